"""All that the ranks of one training segment are told: plain data, no model, no open file.

It passes to other processes as JSON, so that a worker on another node needs only the project and the shared folder.
`digest` says which work a snapshot belongs to; where things lie is not part of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from data_contracts.canonical import digest_of
from data_contracts.config import TrainConfig
from data_contracts.cost import Budget, Frozen
from data_contracts.records import ModelPin, Plan


class Places(Frozen):
    """Where the inputs lie; recorded nowhere."""

    tokens: tuple[str, ...] = Field(description="Tables of kind tokens that hold the selected examples.")
    selection: str = Field(description="The selection's table.")
    validation: str = Field(description="The validation tokens' table.")
    retention: str | None = Field(None, description="The retention tokens' table, where they are watched.")
    reference: str | None = Field(
        None, description="Losses of each retention document, the run's first; None: the segment's own first are."
    )
    target: str | None = Field(None, description="The target's tokens, where influence is read in training.")
    checkpoint: str | None = Field(None, description="Folder of the checkpoint to go on from; None starts at the base.")


class Job(Frozen):
    """One segment."""

    folder: str = Field(description="Scratch that survives a kill, shared by all ranks.")
    places: Places
    inputs: dict[str, tuple[str, ...]] = Field(description="Digests of the inputs by name.")
    pin: ModelPin
    plan: Plan
    train: TrainConfig
    policy: dict[str, Any] | None = Field(None, description="Asked after each validation; None is not asked.")
    metric: str = Field("validation_loss", description="The curve's column that the policy watches.")
    direction: Literal["minimise", "maximise"] = "minimise"
    most_forgotten: float | None = Field(None, description="Nats that the retention loss may rise; None is any.")
    cause: Literal["warm_up", "train", "probe"] = "train"
    anneals: bool = Field(False, description="Whether the segment's end decays the learning rate.")
    closes: bool = Field(False, description="Whether the decay lasts the whole segment.")
    evaluate_start: bool = Field(False, description="Whether the model is evaluated before the first step.")
    segment_flops: int | None = Field(None, ge=0, description="Most that the segment may spend, evaluation included.")
    remaining: Budget = Budget()
    order_seed: int = Field(ge=0, description="Of the permutations.")
    torch_seed: int = Field(ge=0, description="Of adapters' initial values and of dropout.")

    @property
    def home(self) -> Path:
        """The scratch folder."""
        return Path(self.folder)

    @property
    def selection(self) -> str:
        """What is trained on, by digest; "" where the segment draws it itself."""
        return next(iter(self.inputs.get("selection", ())), "")

    @property
    def digest(self) -> str:
        """What this work is, without where it lies."""
        return digest_of(self.model_dump(mode="json", exclude={"folder": True, "places": True, "pin": {"locator"}}))
