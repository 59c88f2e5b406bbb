"""Past quotes of a store and what came of the runs that followed, for `stages.governor.past` to score.

A run follows a quote that was made before it by the same configuration on the same data and model; what comes after
training (`evaluate`, `judge`, `promote`), names and prices aside. Whether choosing won is known where runs stand in the
store that are alike but for the way of choosing: one that took the quoted choice, one that took chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_contracts.canonical import digest_of
from data_contracts.errors import ArtifactError
from data_contracts.quotes import HOURS_FILE, Hours, Offer, Quote
from data_contracts.records import Decision
from data_contracts.store import AttemptRow, RunRow, Store
from stages.governor.past import Came, Scores, choice, score

NEWEST = 200
"""Runs that are looked at."""
CHOOSING = ("auto", "score", "select")
AFTERWARDS = ("name", "store", "evaluate", "judge", "promote")


@dataclass(frozen=True)
class Past:
    """A quote, and the run that followed it."""

    run: str
    started: float
    quote: Quote
    hours: Hours
    followed_by: str | None
    came: Came | None


@dataclass(frozen=True)
class _Run:
    """A finished run: what it was asked, how it chose, and what came of it."""

    row: RunRow
    lineage: str
    setting: str
    """Its lineage but for the way of choosing."""
    way: tuple[dict[str, Any], dict[str, Any]]
    came: Came


def past_quotes(store: Store) -> tuple[Past, ...]:
    """Return the quotes of the store, newest first; one whose artifacts are gone is left out."""
    quotes: list[tuple[RunRow, str, str, Quote, Hours]] = []
    runs: list[_Run] = []
    for row in store.runs()[:NEWEST]:
        if row.status != "FINISHED":
            continue
        try:
            attempts = store.attempts(row.run)
            quoted = [item for item in attempts if item.stage == "quote" and "quote" in item.refs]
            if quoted:
                ref = quoted[-1].refs["quote"]
                hours = Hours.model_validate_json((store.measured(ref) / HOURS_FILE).read_bytes())
                quotes.append((row, *_lineage(store, row, attempts), store.record(ref, Quote), hours))
            elif (run := _finished(store, row, attempts)) is not None:
                runs.append(run)
        except (ArtifactError, OSError):
            continue
    return tuple(_followed(*item, runs) for item in quotes)


def scores(past: Sequence[Past]) -> Scores:
    """Return the scores of those that a run followed."""
    return score((item.quote, item.hours, item.came) for item in past if item.came is not None)


def _followed(row: RunRow, lineage: str, setting: str, quote: Quote, hours: Hours, runs: Sequence[_Run]) -> Past:
    after = [run for run in runs if run.lineage == lineage and run.row.started >= row.started]
    if not after:
        return Past(row.run, row.started, quote, hours, None, None)
    first = min(after, key=lambda run: run.row.started)
    came = first.came.model_copy(update={"won": _won(choice(quote), setting, runs)})
    return Past(row.run, row.started, quote, hours, first.row.run, came)


def _won(chosen: Offer | None, setting: str, runs: Sequence[_Run]) -> bool | None:
    """Return whether the chosen way ended below chance, in the newest run of each; None where one was not run."""
    if chosen is None:
        return None
    alike = [run for run in runs if run.setting == setting and run.came.loss is not None]
    mine = next((run.came.loss for run in alike if chosen.takes(*run.way)), None)
    by_chance = next((run.came.loss for run in alike if run.way[1]["selector"].get("method") == "random"), None)
    return None if mine is None or by_chance is None else mine < by_chance


def _finished(store: Store, row: RunRow, attempts: Sequence[AttemptRow]) -> _Run | None:
    """Return what came of a run whose last decision was to stop; None where it did not get there."""
    decided = [item for item in attempts if "decision" in item.refs]
    decision = store.record(decided[-1].refs["decision"], Decision) if decided else None
    if decision is None or not decision.stops:
        return None
    selected = [item for item in attempts if item.stage == "select"]
    select = store.read_manifest(selected[-1].run).config["select"] if selected else {"selector": {"method": "random"}}
    scored = [item for item in attempts if item.stage == "score"]
    score_ = store.read_manifest(scored[-1].run).config["score"] if scored else {"scorer": {}, "coverage": {}}
    costs = list({item.run: item.costs for item in attempts}.values())
    each = [cost for by_cause in costs for cost in by_cause.values()]
    config = store.run_config(row.run)
    watched = config["govern"]["metric"] == "validation_loss"
    energy = sum(cost.joules for cost in each)
    came = Came(
        loss=decision.best_loss if watched else None,
        flops=float(sum(cost.flops for cost in each)),
        seconds=sum(cost.seconds for cost in each),
        joules=energy if energy > 0 else None,
    )
    return _Run(row, *_lineage(store, row, attempts), (score_, select), came)


def _lineage(store: Store, row: RunRow, attempts: Sequence[AttemptRow]) -> tuple[str, str]:
    """Return (lineage, lineage but for the way of choosing) of a run: by its configuration and what it read."""
    config = {name: value for name, value in store.run_config(row.run).items() if name not in AFTERWARDS}
    config = {**config, "budget": {name: value for name, value in config["budget"].items() if name != "price"}}
    read = sorted(_read(attempts))
    setting = {name: value for name, value in config.items() if name not in CHOOSING}
    return digest_of([config, read]), digest_of([setting, read])


def _read(attempts: Sequence[AttemptRow]) -> Iterator[tuple[str, str]]:
    """Yield name and digest of what the run's ingest gave."""
    for item in attempts:
        if item.stage == "ingest":
            yield from ((name, ref.digest) for name, ref in item.refs.items() if name != "quarantine")
