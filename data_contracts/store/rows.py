"""What the store tells of runs and attempts, as plain values: for pages, for `lazytrain status`, for the garbage.

MLflow's own values stay behind `attempts.py`, which makes these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from data_contracts.cost import Cost, Frozen
from data_contracts.records import Ref

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
