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
from stages.technique.attempt import AllReduce
from stages.technique.bounds import Bounds
from stages.technique.states import HeldAdamW
from stages.technique.step import (
    Moments,
    States,
    StepResult,
    held_states,
    load_moments,
    load_states,
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
    loss_chunks: int
    products: RowProducts | None
    in_backward: bool
    host: str | None
    bounds: Bounds | None


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
        """Take one window at learning rate `rate`; arguments and result as of `optimizer_step`.

        Where memory runs out (`ShortOfMemoryError`) nothing was updated, and the same window may be asked for again.
        """

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

        Scoring reads those two from a checkpoint, in float32; nothing else may be called so.
        """
        return {}

    def held(self) -> dict[str, Tensor]:
        """Return that state bit for bit, for a snapshot: other than `tensors` where moments are held in fewer bits."""
        return self.tensors()

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what `plain`, and `tensors` or `held`, gave, in place of whatever state there was; the weights are
        written afterwards."""
        self.windows, self.updates = int(plain["windows"]), int(plain["updates"])

    @abstractmethod
    def stand(self) -> dict[str, list[Tensor]]:
        """Put state in place as it stands before the dearest window, zeros for values, and return it by parameter.

        What `plan` traces: afterwards one `step` over two micro-batches holds as much as any ever will.
        """

    def price(self, window: int) -> FlopModel:
        """Return the operations of window `window` (0-based, over the optimizer's life): passes as they then run."""
        if self._priced is None:
            self._priced = FlopModel.trace(self.model, train=True)
        return self._priced

    def priced_as(self, passes: FlopModel) -> None:
        """Take the operations of a window from elsewhere: a model that is spread over ranks cannot be traced by one."""
        self._priced = passes

    def cycle(self) -> Sequence[int]:
        """Return windows whose mean price is that of a long training."""
        return (0,)


class Adam(Optimizer):
    """AdamW over everything that trains."""

    def __init__(self, model: nn.Module, train: TrainConfig, rate: float, states: States = "float32") -> None:
        super().__init__(model)
        self.adamw = optimizer_for(model, train, rate, states)

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one step of AdamW."""
        set_rate(self.adamw, rate)
        result = optimizer_step(self.model, self.adamw, window, **how)
        self.windows, self.updates = self.windows + 1, self.updates + result.applied
        return result

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments of what trains, zeros before the first update."""
        return named_moments(moments_of(self.adamw, self.model))

    def held(self) -> dict[str, Tensor]:
        """Return AdamW's states as they are."""
        return held_states(self.adamw, self.model)

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take the moments over. Raises KeyError for a trained parameter without them."""
        super().restore(plain, tensors)
        give(self.adamw, self.model, tensors, self.updates)

    def stand(self) -> dict[str, list[Tensor]]:
        """Put zero moments in place; return them and AdamW's counters."""
        return stood(self.adamw, self.model)


def give(adamw: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], updates: int) -> None:
    """Give an AdamW its state: bit for bit where `held_states` gave it, else the moments, which `updates` have made.

    Without updates it has none afterwards.
    """
    adamw.state.clear()
    if any(name.startswith("step.") for name in tensors):
        load_states(adamw, model, tensors)
    elif updates:
        load_moments(adamw, model, moments_in(tensors), updates)


def stood(adamw: torch.optim.Optimizer, model: nn.Module) -> dict[str, list[Tensor]]:
    """Put zero state into an AdamW, as after an update, and return its tensors by parameter."""
    held = {}
    for name, item in trainable(model).items():
        state = adamw.empty_state(item) if isinstance(adamw, HeldAdamW) else {}
        for key in () if state else ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(item)
        adamw.state[item] = {"step": torch.tensor(1.0)} | state
        held[name] = [value for value in adamw.state[item].values() if isinstance(value, Tensor)]
    return held


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all of torch's parameter groups; of one with a `share`, that share of it."""
    for options in optimizer.param_groups:
        options["lr"] = rate * options.get("share", 1.0)


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
