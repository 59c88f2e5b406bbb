"""How a technique takes a window: what it keeps between windows, and which weights a window may move.

`train` steps it, snapshots and checkpoints keep its state, `plan` traces and prices the same object. `Adam` is the
plain form: AdamW over everything that trains, always. Whoever resumes restores the optimizer first and the weights
after it, because its state may decide which tensors hold the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from stages.gradients.row_products import RowProducts
from stages.meter.flops import FlopModel
from stages.model.batch import TokenBatch
from stages.model.checkpoint import FIRST, SECOND
from stages.technique.step import (
    AllReduce,
    Moments,
    StepResult,
    load_moments,
    moments_of,
    optimizer_for,
    optimizer_step,
    trainable,
)

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig


class How(TypedDict, total=False):
    """Settings of a step that do not depend on the technique; see `optimizer_step`."""

    clip: float
    precision: str
    all_reduce: AllReduce | None
    chunk_tokens: int | None
    products: RowProducts | None


class Optimizer(ABC):
    """Steps of one model.

    Attributes:
        model: what it moves.
        windows: windows taken over its life, applied or not; schedules (which block trains, which direction is drawn)
            go by it, so that every rank and every resumed life agrees.
        updates: updates that the moments have seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.windows, self.updates = model, 0, 0
        self._priced: FlopModel | None = None

    @abstractmethod
    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one window at learning rate `rate`; arguments and result as of `optimizer_step`."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return by name every tensor that steps may have moved since the model was loaded, in place to be written to.

        By default what trains.
        """
        return trainable(self.model)

    def plain(self) -> dict[str, Any]:
        """Return all state that is no tensor, as JSON data."""
        return {"windows": self.windows, "updates": self.updates}

    def tensors(self) -> dict[str, Tensor]:
        """Return all other state by name; Adam's two moments of a parameter are `exp_avg.NAME` and `exp_avg_sq.NAME`.

        Scoring reads those two from a checkpoint; nothing else may be called so.
        """
        return {}

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what `plain` and `tensors` gave; the weights are written afterwards."""
        self.windows, self.updates = int(plain["windows"]), int(plain["updates"])

    @abstractmethod
    def stand(self) -> list[Tensor]:
        """Put state in place as it stands before the dearest window, zeros for values, and return what is held.

        What `plan` traces: afterwards one `step` over two micro-batches holds as much as any ever will.
        """

    def price(self, window: int) -> FlopModel:
        """Return the operations of window `window` (0-based, over the optimizer's life): passes as they then run."""
        if self._priced is None:
            self._priced = FlopModel.trace(self.model, train=True)
        return self._priced

    def cycle(self) -> Sequence[int]:
        """Return windows whose mean price is that of a long training."""
        return (0,)


class Adam(Optimizer):
    """AdamW over everything that trains."""

    def __init__(self, model: nn.Module, train: TrainConfig, rate: float) -> None:
        super().__init__(model)
        self.adamw = optimizer_for(model, train, rate)

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one step of AdamW."""
        set_rate(self.adamw, rate)
        result = optimizer_step(self.model, self.adamw, window, **how)
        self.windows, self.updates = self.windows + 1, self.updates + result.applied
        return result

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments of what trains, zeros before the first update."""
        return named_moments(moments_of(self.adamw, self.model))

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take the moments over. Raises KeyError for a trained parameter without them."""
        super().restore(plain, tensors)
        if self.updates:
            load_moments(self.adamw, self.model, moments_in(tensors), self.updates)

    def stand(self) -> list[Tensor]:
        """Put zero moments in place; return them and AdamW's counters."""
        zeros = {name: (torch.zeros_like(item), torch.zeros_like(item)) for name, item in trainable(self.model).items()}
        load_moments(self.adamw, self.model, zeros, 1)
        return [item for state in self.adamw.state.values() for item in state.values()]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all of torch's parameter groups."""
    for options in optimizer.param_groups:
        options["lr"] = rate


def named_moments(moments: Moments) -> dict[str, Tensor]:
    """Return moments as named tensors."""
    named = {}
    for name, (first, second) in moments.items():
        named[FIRST + name], named[SECOND + name] = first, second
    return named


def moments_in(tensors: Mapping[str, Tensor]) -> Moments:
    """Return the moments among named tensors."""
    names = [name.removeprefix(FIRST) for name in tensors if name.startswith(FIRST)]
    return {name: (tensors[FIRST + name], tensors[SECOND + name]) for name in names}
