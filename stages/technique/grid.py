"""Training of weights that are never more than n bits: AdamW moves one matrix at a time, and rounding puts it back.

A matrix stands whole while it is updated, and is then rounded stochastically: what a step moves it by is kept in the
mean, however small beside the numbers' distance. Its draws follow from a seed, the window and its name, so that every
rank and every resumed life agrees. Forward and backward passes make weights where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from stages.model.batch import TokenBatch
from stages.model.grouped import GroupedLinear
from stages.technique.held import TrainedProduct
from stages.technique.optimizer import Adam, How, set_rate
from stages.technique.step import States, StepResult, optimizer_step, trainable
from stages.technique.zeroth import generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from data_contracts.config import TrainConfig

GRID = "grid."


class GridLinear(GroupedLinear):
    """A held layer whose numbers train. `weight` has the weight's shape, for its gradient, and one number's bytes."""

    def __init__(self, layer: nn.Linear, bits: int, group: int | None) -> None:
        super().__init__(layer, bits, group, symmetric=True)
        self.weight = _shadow(layer.weight.new_zeros(()), layer.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        return TrainedProduct.of(x, self.weight, self)

    def gradient_of(self, grad_OI: Tensor) -> Tensor:
        """Return the weight's gradient in float32."""
        return grad_OI.float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GridLinear:
        """Move the layer; `weight` stays as small as it is."""
        weight = self._parameters.pop("weight")
        assert weight is not None
        super()._apply(fn, recurse)
        number = torch.zeros((), dtype=weight.dtype, device=weight.device)
        self.weight = _shadow(fn(number), weight.shape, weight.requires_grad)
        return self


def _shadow(number: Tensor, shape: torch.Size, trains: bool = True) -> nn.Parameter:
    return nn.Parameter(number.detach().expand(shape), requires_grad=trains)


@dataclass
class GridStep:
    """Stands for AdamW in `optimizer_step`: every parameter that has a gradient is updated, those on a grid alone.

    Attributes:
        adamw: has the moments.
        layers: name and layer of each parameter on a grid.
        seed, window: decide the draws.
    """

    adamw: torch.optim.Optimizer
    layers: Mapping[nn.Parameter, tuple[str, GridLinear]]
    seed: int
    window: int = 0

    def step(self) -> None:
        """Take one step."""
        waiting = [(item, item.grad) for item in self.layers if item.grad is not None]
        for item, _ in waiting:
            item.grad = None
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)  # of what was updated: once
        for item, gradient in waiting:
            name, layer = self.layers[item]
            held, item.data = item.data, layer.whole()
            item.grad = gradient
            self.adamw.step()
            item.grad = None
            layer.hold(item.data, generator(item.device, self.seed, self.window, name))
            item.data = held

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.adamw.zero_grad(set_to_none)


class GridAdam(Adam):
    """AdamW over everything, matrices of the decoder's layers on a grid of n bits."""

    def __init__(self, model: nn.Module, train: TrainConfig, rate: float, states: States, seed: int) -> None:
        super().__init__(model, train, rate, states)
        found = {name: layer for name, layer in model.named_modules() if isinstance(layer, GridLinear)}
        self.grid = GridStep(self.adamw, {layer.weight: (name, layer) for name, layer in found.items()}, seed)

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one step of AdamW and round."""
        set_rate(self.adamw, rate)
        self.grid.window = self.windows
        result = optimizer_step(self.model, cast(torch.optim.Optimizer, self.grid), window, **how)
        self.windows, self.updates = self.windows + 1, self.updates + result.applied
        return result

    def weights(self) -> Mapping[str, Tensor]:
        """Return numbers and scales, and the parameters that stand whole."""
        whole = {name: item for name, item in trainable(self.model).items() if item not in self.grid.layers}
        return whole | self._numbers()

    def plain(self) -> dict[str, Any]:
        """Add the seed of all draws."""
        return super().plain() | {"seed": self.grid.seed}

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments, and numbers and scales as they are: a checkpoint's whole weights are rounded again."""
        return super().tensors() | {GRID + name: value for name, value in self._numbers().items()}

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on with the same draws and numbers."""
        super().restore(plain, tensors)
        self.grid.seed = int(plain["seed"])
        for name, value in self._numbers().items():
            if GRID + name in tensors:
                value.copy_(tensors[GRID + name])

    def _numbers(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, layer in self.grid.layers.values()
            for key, value in layer.named_buffers(recurse=False)
        }
