"""Adam on what lies outside the layers, always, and on a few layers drawn anew for each stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from stages.meter.flops import FlopModel
from stages.model.batch import TokenBatch
from stages.technique.blocks import layer_blocks, outer_blocks
from stages.technique.optimizer import How, Optimizer, moments_in, named_moments, set_rate, stood
from stages.technique.step import Moments, StepResult, moments_of, optimizer_for, optimizer_step, trainable

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig


class DrawnLayers(Optimizer):
    """AdamW on embeddings, last norm and head, and on `count` layers drawn for every `stay` windows.

    The moments of layers go when others are drawn; those of the rest stay. `updates` are of the rest.
    """

    def __init__(self, model: nn.Module, train: TrainConfig, rate: float, *, count: int, stay: int, seed: int) -> None:
        super().__init__(model)
        self.layers, (below, above) = layer_blocks(model), outer_blocks(model)
        self.always = {**below, **above}
        self.count, self.stay, self.seed = count, stay, seed
        self._train, self._rate = train, rate
        self.adamw: torch.optim.Optimizer
        self._prices: dict[tuple[int, ...], FlopModel] = {}
        self._entered = False
        self.enter(0)
        self._entered = True

    def drawn(self, period: int) -> tuple[int, ...]:
        """Return the layers of a stay, from the bottom."""
        draw = np.random.default_rng([self.seed, period]).choice(len(self.layers), self.count, replace=False)
        return tuple(sorted(map(int, draw)))

    def enter(self, period: int) -> None:
        """Let the layers of a stay train, without a past."""
        kept: Moments = {}
        if self._entered:
            kept = {name: pair for name, pair in moments_of(self.adamw, self.model).items() if name in self.always}
        self.period, self.layer_updates = period, 0
        self._only(self.drawn(period))
        self.adamw = optimizer_for(self.model, self._train, self._rate)
        if self.updates:
            self._put(kept, self.updates)

    def _only(self, layers: Sequence[int]) -> None:
        self.model.requires_grad_(False)
        for block in (self.always, *(self.layers[number] for number in layers)):
            for parameter in block.values():
                parameter.requires_grad_(True)

    def _put(self, moments: Moments, updates: int) -> None:
        named = trainable(self.model)
        for name, (first, second) in moments.items():
            item = named[name]
            self.adamw.state[item] = {
                "step": torch.tensor(float(updates)),
                "exp_avg": first.to(item.device, item.dtype),
                "exp_avg_sq": second.to(item.device, item.dtype),
            }

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one step of AdamW on what the window's stay trains."""
        if (period := self.windows // self.stay) != self.period:
            self.enter(period)
        set_rate(self.adamw, rate)
        result = optimizer_step(self.model, self.adamw, window, **how)
        self.windows += 1
        self.updates, self.layer_updates = self.updates + result.applied, self.layer_updates + result.applied
        return result

    def weights(self) -> Mapping[str, Tensor]:
        """Return all parameters."""
        return {**self.always, **{name: item for block in self.layers for name, item in block.items()}}

    def plain(self) -> dict[str, Any]:
        """Add the seed, the stay whose layers train, and their updates."""
        return super().plain() | {"seed": self.seed, "period": self.period, "layer_updates": self.layer_updates}

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments of what trains."""
        return named_moments(moments_of(self.adamw, self.model))

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on in the same stay with the same draws."""
        self.seed = int(plain["seed"])
        self.enter(int(plain["period"]))
        super().restore(plain, tensors)
        self.adamw.state.clear()
        self.layer_updates = int(plain["layer_updates"])
        moments = moments_in(tensors)
        if self.updates:
            self._put({name: pair for name, pair in moments.items() if name in self.always}, self.updates)
        if self.layer_updates:
            self._put({name: pair for name, pair in moments.items() if name not in self.always}, self.layer_updates)

    def stand(self) -> dict[str, list[Tensor]]:
        """Let the lowest layers train (all draws hold about the same), with zero moments; return what is held."""
        self._only(range(self.count))
        self.adamw = optimizer_for(self.model, self._train, self._rate)
        return stood(self.adamw, self.model)

    def price(self, window: int) -> FlopModel:
        """Return the operations of a window: the backward pass reaches the embeddings whatever layers are drawn."""
        layers = self.drawn(window // self.stay)
        alike = len({tuple(sorted(tuple(p.shape) for p in block.values())) for block in self.layers}) == 1
        key = () if alike else layers
        if key not in self._prices:
            try:
                self._only(layers)
                self._prices[key] = FlopModel.trace(self.model, train=True)
            finally:
                self._only(self.drawn(self.period))
        return self._prices[key]
