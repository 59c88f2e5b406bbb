"""What the store tells of runs and attempts, as plain values: for pages, for `lazytrain status`, for the garbage.

MLflow's own values stay behind `attempts.py`, which makes these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from pydantic import Field

from data_contracts.cost import Cost, Frozen
from data_contracts.errors import ArtifactError
from data_contracts.records import Manifest, Ref

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


class RunRow(Frozen):
    """A pipeline run."""

    run: str
    name: str
    status: Status
    started: float
    """Epoch seconds."""
    seconds: float | None = None
    reason: str = ""
    resumes: str = ""
    """The run that it went on with."""


class AttemptRow(Frozen):
    """What a stage did in a pipeline run: an attempt of its own, or a commit that it adopted (`cached`)."""

    name: str
    stage: str
    status: Status
    run: str
    identity: str
    cached: bool
    started: float
    seconds: float | None = None
    round: int | None = None
    reason: str = ""
    refs: dict[str, Ref] = Field(default_factory=dict)
    costs: dict[str, Cost] = Field(default_factory=dict)


class Noted(Frozen):
    """A result as a pipeline run remembers it; the rest stands in the manifest of `run`."""

    name: str
    stage: str
    run: str
    identity: str
    cached: bool
    at: float


def noted_in(params: Mapping[str, str]) -> list[Noted]:
    """Return the results that a pipeline run's params remember, in the order they came."""
    found = [Noted.model_validate_json(value) for key, value in params.items() if key.startswith("result.")]
    return sorted(found, key=lambda item: item.at)


def merged(
    attempts: Iterable[AttemptRow], noted: Iterable[Noted], manifest_of: Callable[[str], Manifest]
) -> list[AttemptRow]:
    """Return what was done or adopted in a pipeline run, oldest first, with the references and costs of manifests.

    Args:
        attempts: those below the run.
        noted: the results that it remembers; one whose artifacts are gone says so as its reason.
        manifest_of: reads the manifest of an attempt; raises `ArtifactError` where it is gone.
    """
    rows = {row.run: row for row in attempts}
    for item in noted:
        refs: dict[str, Ref] = {}
        costs: dict[str, Cost] = {}
        gone = ""
        try:
            manifest = manifest_of(item.run)
        except ArtifactError as error:
            gone = error.found
        else:
            refs, costs = {name: output.ref for name, output in manifest.outputs.items()}, manifest.costs
        known = None if item.cached else rows.get(item.run)
        rows[f"{item.run}:{item.name}:{item.at}" if known is None else item.run] = AttemptRow(
            name=item.name,
            stage=item.stage,
            status="FINISHED",
            run=item.run,
            identity=item.identity,
            cached=item.cached,
            started=known.started if known else item.at,
            seconds=known.seconds if known else None,
            round=known.round if known else None,
            reason=gone,
            refs=refs,
            costs=costs,
        )
    return sorted(rows.values(), key=lambda row: row.started)
