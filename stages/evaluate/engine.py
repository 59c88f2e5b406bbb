"""The engine of evaluation: one model at a time through every task, one row an item.

Base, champion and candidate see the same items in the same blocks, so their outcomes can be compared pair by pair. A
champion that is the candidate, byte for byte, is not asked twice. Held in memory: one model, one block of items, and
the outcomes so far.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.compute as pc

from data_contracts.config import EvaluateConfig
from data_contracts.cost import Cost
from data_contracts.errors import ConfigError, InputError, MethodError
from data_contracts.method import resolve
from data_contracts.records import ModelPin, Summary
from stages.evaluate.bench import ModelBench
from stages.evaluate.report import report
from stages.evaluate.task import Item, Outcome, Task
from stages.meter.machine import device_kind
from stages.meter.memory import peak_bytes
from stages.model.batch import TokenTable
from stages.model.pin import read_pin
from stages.stage import Artifact, Inputs, Work

BLOCK_ITEMS = 1024
OTHER_TOKENIZER = "not comparable: this model reads another tokenizer's tokens"

Outcomes = dict[tuple[str, str], list[Outcome]]
"""Outcomes by (suite, model)."""


@dataclass(frozen=True)
class Contestant:
    """A model to be asked: its name in the evaluation, its base, and its checkpoint (None: the base itself)."""

    name: str
    pin: ModelPin
    checkpoint: Artifact | None

    @property
    def content(self) -> tuple[str, str]:
        """What makes two contestants the same model."""
        return self.pin.digest, self.checkpoint.ref.digest if self.checkpoint else ""


class Holdout:
    """The holdout's items: its tokens with the examples that they were made from."""

    def __init__(self, examples: Artifact, tokens: Artifact) -> None:
        table = tokens.table()
        self._tokens, self._truncated = TokenTable(table), table.column("truncated")
        self._examples = examples.table()
        self._at = pc.index_in(table.column("example_id"), value_set=self._examples.column("example_id"))
        if not len(self._tokens):
            raise InputError(
                "a holdout of at least one item", "it has none", "look at the quarantine that ingest wrote"
            )
        if self._at.null_count:
            raise InputError("the example of every holdout item", "some are missing", "pass both outputs of one ingest")
        self.sources = dict(zip(self._tokens.ids.to_pylist(), self._tokens.sources.to_pylist(), strict=True))

    def __len__(self) -> int:
        return len(self._tokens)

    def blocks(self) -> Iterator[list[Item]]:
        """Yield the items in blocks, in the order of the table."""
        for start in range(0, len(self), BLOCK_ITEMS):
            yield [self._item(index) for index in range(start, min(start + BLOCK_ITEMS, len(self)))]

    def _item(self, index: int) -> Item:
        example = self._examples.slice(self._at[index].as_py(), 1).to_pylist()[0]
        return Item.read(example, self._tokens.row(index), self._truncated[index].as_py())


def evaluate_models(config: EvaluateConfig, inputs: Inputs, work: Work) -> Summary:
    """Ask every model every task and write `evaluation`. Raises `InputError` for an empty holdout."""
    tasks = [resolve(Task, settings, f"evaluate.tasks[{i}]") for i, settings in enumerate(config.tasks)]
    names = [task.suite_name for task in tasks]
    if len(set(names)) != len(names):
        raise ConfigError("each task has its own suite name", f"they are {names}", "give one of them `suite: …`")
    holdout = Holdout(inputs.one("holdout"), inputs.one("holdout_tokens"))
    contestants = _contestants(inputs)
    base = contestants[0].pin
    began, spent = time.perf_counter(), {"eval": Cost(), "infer": Cost()}
    outcomes: Outcomes = {}
    asked: dict[tuple[str, str], str] = {}
    with work.progress("evaluate", float(len(contestants) * len(holdout) * len(tasks)), "items") as bar:
        for contestant in contestants:
            twin = asked.setdefault(contestant.content, contestant.name)
            if twin != contestant.name:
                for name in names:
                    outcomes[name, contestant.name] = outcomes[name, twin]
                bar.advance(len(holdout) * len(tasks))
                continue
            if contestant.pin.tokenizer_digest != base.tokenizer_digest:
                work.notice(f"{contestant.name} is {OTHER_TOKENIZER}")
                unscored = [Outcome(item_id, note=OTHER_TOKENIZER) for item_id in holdout.sources]
                outcomes |= {(name, contestant.name): unscored for name in names}
                bar.advance(len(holdout) * len(tasks))
                continue
            folder: Path | None = contestant.checkpoint.folder if contestant.checkpoint else None
            bench = ModelBench(contestant.pin, folder, device_kind())
            for block in holdout.blocks():
                for task in tasks:
                    found = _checked(task, block, task.outcomes(bench, block))
                    outcomes.setdefault((task.suite_name, contestant.name), []).extend(found)
                    bar.advance(len(block))
            spent = {cause: cost + bench.spent[cause] for cause, cost in spent.items()}
            del bench
            gc.collect()  # one model at a time, also where a reference cycle holds the last
    spent["eval"] += Cost(seconds=time.perf_counter() - began - spent["infer"].seconds)
    for cause, cost in spent.items():
        if cost.tokens:
            work.charge(cause, cost.model_copy(update={"peak_bytes": peak_bytes()}))
    for name in names:
        if not outcomes.get((name, "base")):
            work.notice(f"no holdout item suits the suite {name!r}: a gate on it will fail")
    _write(outcomes, holdout, work)
    return report(outcomes, [c.name for c in contestants], len(holdout), sum(cost.flops for cost in spent.values()))


def _contestants(inputs: Inputs) -> list[Contestant]:
    pin = read_pin(inputs.one("base"))
    found = [Contestant("base", pin, None)]
    candidate, champion = inputs.maybe("checkpoint"), inputs.maybe("champion")
    if candidate is not None:
        found.append(Contestant("candidate", pin, candidate))
    if champion is not None:
        other = inputs.maybe("champion_base")
        found.append(Contestant("champion", read_pin(other) if other else pin, champion))
    return found


def _checked(task: Task, block: Sequence[Item], outcomes: Iterator[Outcome]) -> list[Outcome]:
    """Return the outcomes in the order of the items. Raises `MethodError` for an unknown or repeated item."""
    found: dict[str, Outcome] = {}
    known = {item.item_id for item in block}
    for outcome in outcomes:
        if outcome.item_id in found or outcome.item_id not in known:
            raise MethodError(
                f"task {task.name()} gives at most one outcome for each item it was given",
                f"it gave {outcome.item_id} {'twice' if outcome.item_id in found else 'without being asked'}",
                "mend the task",
            )
        found[outcome.item_id] = replace(outcome, log_likelihoods=tuple(map(float, outcome.log_likelihoods)))
    return [found[item.item_id] for item in block if item.item_id in found]


def _write(outcomes: Outcomes, holdout: Holdout, work: Work) -> None:
    with work.writer("evaluation") as writer:
        for suite, model in sorted(outcomes):
            for outcome in outcomes[suite, model]:
                writer.append(
                    {
                        "suite": suite,
                        "model": model,
                        "source": holdout.sources[outcome.item_id],
                        **outcome.__dict__,
                        "log_likelihoods": list(outcome.log_likelihoods),
                    }
                )
