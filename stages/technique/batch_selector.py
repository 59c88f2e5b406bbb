"""The family of batch selectors: a step draws more rows than it trains on, and a selector picks among them.

A selector names the parameters whose gradients it reads, says what it keeps of a row's gradient (`note`: K numbers a
row), and chooses from these numbers alone. Running the passes is `looking.py`'s part, drawing the candidates, sharing
them among ranks and counting what it cost is training's. This module imports no torch, so that a stage's declaration
can name the family. Shapes: n candidates of a step, S rows picked, d some documents, P a parameter's elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from data_contracts.config import Saving, TrainConfig
from data_contracts.errors import ConfigError
from data_contracts.method import Method, resolve
from stages.technique.base import Technique

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from stages.technique.looking import Given

SAVINGS: frozenset[Saving] = frozenset({"recompute", "chunked_loss", "update_in_backward"})
"""Of a plan, those that leave the passes over candidates and Adam's moments as they are."""


@dataclass(frozen=True)
class Picked:
    """What a step trains on.

    Attributes:
        places: of the picked rows among the candidates, ascending.
        weight_S: float64, factor on each row's loss beside its own weight; its mean is 1.
        gain_S: float64, of the selector's objective when the row was taken; None where it has none.
    """

    places: np.ndarray
    weight_S: np.ndarray
    gain_S: np.ndarray | None = None

    @classmethod
    def first(cls, count: int) -> Picked:
        """Return the first candidates: they come in an order drawn by chance."""
        return cls(np.arange(count), np.ones(count))


class BatchSelector(Method):
    """One way of picking a step's rows."""

    family: ClassVar[str] = "batch_selectors"
    home: ClassVar[str] = "stages.technique.batch_selectors"
    reads_target: ClassVar[bool] = False
    """Whether it is given the direction D Ḡ of the target; before there is one, the first candidates are taken."""

    candidates: int = Field(2, ge=2, le=64, description="Rows drawn for each row trained on.")

    @property
    def direction_steps(self) -> int:
        """Optimizer steps that a direction is kept."""
        raise TypeError(f"{type(self).__name__} reads no target")

    def kept(self, rows: int) -> int:
        """Return how many of so many candidates are trained on."""
        return -(-rows // self.candidates)

    def read(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters whose gradients it reads; `model` is wrapped and may hold no data.

        Raises `ConfigError` where the model has none.
        """
        raise TypeError(f"{type(self).__name__} defines no read")

    def numbers(self, sizes: Mapping[str, int]) -> int:
        """Return K, the numbers kept of a row, for parameters of these sizes."""
        raise TypeError(f"{type(self).__name__} defines no numbers")

    def row_flops(self, sizes: Mapping[str, int]) -> int:
        """Return the operations that `note` takes a row, beside the passes."""
        raise TypeError(f"{type(self).__name__} defines no row_flops")

    def note(self, number_dK: Tensor, name: str, gradient_dP: Tensor, given: Given) -> None:
        """Add to `number_dK` what is kept of parameter `name`'s gradients, which may be written over."""
        raise TypeError(f"{type(self).__name__} defines no note")

    def choose(self, number_nK: np.ndarray, source_n: np.ndarray, share_n: np.ndarray, count: int) -> Picked:
        """Return at most `count` of n candidates, a function of the arguments alone.

        Args:
            number_nK: what was kept of each, float32.
            source_n: its source, int64.
            share_n: its source's share of the visits of the selection.
            count: rows to pick, at least 1.
        """
        raise TypeError(f"{type(self).__name__} defines no choose")


def batch_selector_of(train: TrainConfig) -> BatchSelector | None:
    """Return the batch selector that is asked for, or None. Raises `ConfigError` for settings that it has not."""
    settings: dict[str, Any] | None = train.batch_selector
    return None if settings is None else resolve(BatchSelector, settings, "train.batch_selector")


def refuse_batch_selector(train: TrainConfig, technique: Technique) -> None:
    """Raise `ConfigError` where rows cannot be picked for what `technique` trains, or beside `train.influence`."""
    selector = batch_selector_of(train)
    if selector is None:
        return
    name = type(selector).name()
    if not technique.steady:
        raise ConfigError(
            "`train.batch_selector` goes with a technique of backward passes, the same parameters and Adam's own "
            "moments",
            f"{type(technique).name()} is another",
            "unset `train.batch_selector`, or list only `full`, `lora` or `qlora` in `plan.techniques`",
        )
    if selector.reads_target and train.influence:
        raise ConfigError(
            "one direction of the target is held in training",
            f"`train.influence: {train.influence}` and `train.batch_selector: {name}` have one each",
            "unset one of them; table `example_choices` holds what each chosen row was worth",
        )


def refuse_savings(used: Mapping[str, bool]) -> None:
    """Raise `ConfigError` where a plan uses savings that rows cannot be picked with."""
    if wrong := sorted(name for name, on in used.items() if on and name not in SAVINGS):
        raise ConfigError(
            f"`train.batch_selector` goes with the savings {', '.join(sorted(SAVINGS))}",
            f"the plan uses {', '.join(wrong)}",
            "plan again with the same `train.batch_selector`, which leaves the others out",
        )
