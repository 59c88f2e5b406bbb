"""Runs of a pipeline and attempts of its stages, as MLflow runs whose status is true.

A pipeline run is the parent of its attempts. An attempt is FINISHED only after its commit, FAILED on an error, KILLED
on a signal; one whose process ended without a word is closed by `zombies.py`. What a stage said goes to
params and metrics under legal names; the whole of it is in the manifest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from data_contracts.canonical import digest_of
from data_contracts.cost import Cost
from data_contracts.records import Origin, Result, Summary
from data_contracts.store.heartbeat import HEARTBEAT, stamp
from data_contracts.store.lease import KIND
from data_contracts.store.names import legal, renamed
from data_contracts.store.process import this_process
from data_contracts.store.rows import AttemptRow, Noted, RunRow, Status, noted_in
from data_contracts.store.tracking import Tracking

PARENT = "mlflow.parentRunId"
STAGE, IDENTITY, NAME, ROUND = "lazytrain.stage", "lazytrain.identity", "lazytrain.name", "lazytrain.round"
SHARED, RESUMES, KIN = "lazytrain.shared", "lazytrain.resumes", "lazytrain.kin"
CONFIG = "lazytrain.config"
PROCESS, REASON, COSTS, MANIFEST = "lazytrain.process", "lazytrain.reason", "lazytrain.costs", "manifest"
_LONGEST_VALUE = 5000


class Attempts:
    """The runs of one experiment."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    def open_pipeline(self, name: str, config: Mapping[str, Any], resumes: str | None = None) -> str:
        """Open a pipeline run and return its id."""
        tags = {KIND: "pipeline", PROCESS: this_process().model_dump_json(), HEARTBEAT: stamp()}
        if resumes is not None:
            tags[RESUMES] = resumes
        return self._create(name, {**tags, CONFIG: digest_of(config)})

    def open_attempt(self, verb: str, identity: str, origin: Origin, *, shared: bool, kin: str = "") -> str:
        """Open an attempt of a stage, below the pipeline run it belongs to, and return its id.

        `shared` says that a commit of the identity ends it; without, its own manifest does. `kin` is what commits share
        whose rows came about the same way; "" for none.
        """
        tags = {
            KIND: "attempt",
            STAGE: verb,
            IDENTITY: identity,
            NAME: origin.name or verb,
            SHARED: str(shared),
            PROCESS: this_process().model_dump_json(),
            HEARTBEAT: stamp(),
        }
        if kin:
            tags[KIN] = kin
        if origin.run is not None:
            tags[PARENT] = origin.run
        if origin.round is not None:
            tags[ROUND] = str(origin.round)
        return self._create(origin.name or verb, tags)

    def _create(self, name: str, tags: dict[str, str]) -> str:
        experiment = self._tracking.experiment(self._tracking.address.experiment)
        made = self._tracking.do(lambda client: client.create_run(experiment, run_name=name, tags=tags))
        return str(made.info.run_id)

    def close(self, run: str, status: Status, reason: str = "", costs: Mapping[str, Cost] | None = None) -> None:
        """Give `run` its final status, with a reason where it did not finish."""
        tags = {REASON: reason[:_LONGEST_VALUE]} if reason else {}
        if costs:
            tags[COSTS] = dump_costs(costs)
        if tags:
            self._tracking.tag(run, tags)
        self._tracking.do(lambda client: client.set_terminated(run, status))

    @staticmethod
    def sign_of_life(costs: Mapping[str, Cost]) -> dict[str, str]:
        """Return the tags that a heartbeat sets on an attempt: when, and what was spent so far."""
        return {HEARTBEAT: stamp(), COSTS: dump_costs(costs)}

    def say(self, run: str, summary: Summary, costs: Mapping[str, Cost], manifest: str = "") -> None:
        """Log what a stage said: numbers as metrics, the rest as params, each under its legal name."""
        from mlflow.entities import Metric, Param, RunTag

        numbers: dict[str, float] = {}
        words: dict[str, str] = {MANIFEST: manifest} if manifest else {}
        for name, value in {**summary.facts, **{f"measured/{k}": v for k, v in summary.measured.items()}}.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                numbers[name] = float(value)
            elif value is not None and name != MANIFEST:
                words[name] = str(value)[:_LONGEST_VALUE]
        for cause, cost in costs.items():
            numbers.update({f"cost/{cause}/{key}": float(value) for key, value in cost.model_dump().items() if value})
        now = int(time.time() * 1000)
        metrics = [Metric(legal(name), value, now, 0) for name, value in sorted(numbers.items())]
        params = [Param(legal(name), value) for name, value in sorted(words.items())]
        tags = [RunTag(f"name.{short}", text[:_LONGEST_VALUE]) for short, text in renamed({**numbers, **words}).items()]
        if summary.title:
            tags.append(RunTag("mlflow.note.content", summary.title))
        batches = max(len(metrics) / 800, len(params) / 90, len(tags) / 90)
        for i in range(int(batches) + 1):
            self._tracking.do(
                lambda client, i=i: client.log_batch(  # type: ignore[misc]
                    run,
                    metrics=metrics[i * 800 : (i + 1) * 800],
                    params=params[i * 90 : (i + 1) * 90],
                    tags=tags[i * 90 : (i + 1) * 90],
                )
            )

    def note(self, run: str, name: str, result: Result) -> None:
        """Remember a result, made or adopted, in pipeline run `run`; earlier ones of the same name are kept."""
        noted = Noted(
            name=name,
            stage=result.stage,
            run=result.run,
            identity=result.identity,
            cached=result.cached,
            at=round(time.time(), 3),
        )
        value, stem = noted.model_dump_json(), f"result.{legal(name)}."
        number = 1 + sum(key.startswith(stem) for key in self._tracking.params(run))
        while self._tracking.once(run, f"{stem}{number}", value) != value:
            number += 1

    def noted(self, run: str) -> list[Noted]:
        """Return the results of a pipeline run, in the order they came."""
        return noted_in(self._tracking.params(run))

    def users(self) -> dict[str, int]:
        """Return attempt → how many users its result has: configurations whose runs were given it.

        A run that resumes another is of the same user, whatever limits it was given; so are runs of equal
        configurations, a quote and its run among them.
        """
        items = {item.info.run_id: item.data for item in self.search(f"tags.`{KIND}` = 'pipeline'")}
        users: dict[str, set[str]] = {}
        for run, data in items.items():
            first, seen = run, set[str]()
            while (past := items[first].tags.get(RESUMES)) in items and first not in seen:
                seen.add(first)
                first = past
            for noted in noted_in(data.params):
                users.setdefault(noted.run, set()).add(items[first].tags.get(CONFIG, first))
        return {attempt: len(found) for attempt, found in users.items()}

    def pipelines(self) -> list[RunRow]:
        """Return the pipeline runs, newest first."""
        rows = []
        for item in self.search(f"tags.`{KIND}` = 'pipeline'"):
            rows.append(
                RunRow(
                    run=item.info.run_id,
                    name=item.info.run_name or "",
                    status=_status(item),
                    started=item.info.start_time / 1000,
                    seconds=_seconds(item),
                    reason=item.data.tags.get(REASON, ""),
                    resumes=item.data.tags.get(RESUMES, ""),
                )
            )
        return rows

    def get(self, run: str) -> Any:
        """Return one MLflow run, deleted ones too."""
        return self._tracking.do(lambda client: client.get_run(run))

    def deleted(self, run: str) -> bool:
        """Return whether MLflow has `run` among the deleted ones."""
        return bool(self.get(run).info.lifecycle_stage == "deleted")

    def of(self, run: str) -> list[AttemptRow]:
        """Return the attempts below pipeline run `run`, without references and costs of commits, oldest first."""
        rows = [_row(item) for item in self.search(f"tags.`{PARENT}` = '{run}'")]
        return sorted(rows, key=lambda row: row.started)

    def kindred(self, verb: str, kin: str) -> Iterable[str]:
        """Yield the attempts of a stage that finished with this kin, newest first."""
        where = f"tags.`{STAGE}` = '{verb}' and tags.`{KIN}` = '{kin}' and attributes.status = 'FINISHED'"
        for item in self.search(where):
            yield str(item.info.run_id)

    def search(self, where: str, *, deleted: bool = False, everywhere: bool = False) -> Iterable[Any]:
        """Yield the MLflow runs that a filter finds, newest first.

        `deleted` adds those, `everywhere` those of the server's other experiments.
        """
        from mlflow.entities import ViewType

        view = ViewType.ALL if deleted else ViewType.ACTIVE_ONLY
        experiments, token = [self._tracking.experiment(self._tracking.address.experiment)], None
        if everywhere:
            experiments = self._tracking.experiments()
        while True:
            page: Any = self._tracking.do(
                lambda client, token=token: client.search_runs(  # type: ignore[misc]
                    experiments,
                    where,
                    run_view_type=view,
                    max_results=1000,
                    order_by=["attributes.start_time DESC"],
                    page_token=token,
                )
            )
            yield from page
            token = page.token
            if not token:
                return


def dump_costs(costs: Mapping[str, Cost]) -> str:
    """Return costs by cause as JSON text for a tag."""
    return json.dumps({cause: cost.model_dump(exclude_defaults=True) for cause, cost in sorted(costs.items())})


def load_costs(text: str | None) -> dict[str, Cost]:
    """Read what `dump_costs` wrote; nothing where there is no text."""
    return {cause: Cost(**value) for cause, value in json.loads(text or "{}").items()}


def _status(item: Any) -> Status:
    status: Status = item.info.status if item.info.status != "SCHEDULED" else "RUNNING"
    return status


def _seconds(item: Any) -> float | None:
    return (item.info.end_time - item.info.start_time) / 1000 if item.info.end_time else None


def _row(item: Any) -> AttemptRow:
    tags = item.data.tags
    return AttemptRow(
        name=tags.get(NAME, ""),
        stage=tags.get(STAGE, ""),
        status=_status(item),
        run=item.info.run_id,
        identity=tags.get(IDENTITY, ""),
        cached=False,
        started=item.info.start_time / 1000,
        seconds=_seconds(item),
        round=int(tags[ROUND]) if ROUND in tags else None,
        reason=tags.get(REASON, ""),
        costs=load_costs(tags.get(COSTS)),
    )
