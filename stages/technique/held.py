"""Training beside weights that are whole numbers: adapters over groups of inputs (QA-LoRA), or the scales (PEQA).

The numbers never move; AdamW has what trains beside them. A checkpoint is the plain whole model, and what was held is
kept beside it as it was, so that the next segment goes on with the same numbers, not with those of a second rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.model.grouped import GroupedLinear
from stages.model.nf4 import FrozenProduct
from stages.technique.optimizer import Adam

HELD = "held."


class GroupAdapter(GroupedLinear):
    """A held layer with an adapter that sees the sum of each group of inputs: y = W x + scaling · B A pool(x).

    B A is one number an output and group, so it can go into the zero points: z - scaling · B A / s.

    Args:
        layer, bits, group: as of `GroupedLinear`.
        rank: r of A (r, groups), uniform as PEFT's, and B (outputs, r), zeros.
        scaling: of the adapter.
        dropout: share of its inputs dropped in training.
    """

    def __init__(
        self, layer: nn.Linear, bits: int, group: int | None, *, rank: int, scaling: float, dropout: float
    ) -> None:
        super().__init__(layer, bits, group)
        device = layer.weight.device
        self.scaling, self.dropout = scaling, nn.Dropout(dropout)
        self.down = nn.Parameter(torch.empty(rank, self.groups, device=device))
        self.up = nn.Parameter(torch.zeros(self.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b and the adapter's part."""
        pooled = functional.pad(x, (0, self.groups * self.group - self.in_features))
        pooled = self.dropout(pooled.unflatten(-1, (self.groups, self.group)).sum(-1))
        beside = functional.linear(functional.linear(pooled, self.down), self.up)
        return FrozenProduct.of(x, self).add_(beside, alpha=self.scaling)

    @torch.no_grad()
    def folded(self) -> GroupedLinear:
        """Return a held layer of the same numbers and scales, whose zero points have taken the adapter in."""
        assert self.zeros is not None
        found = GroupedLinear.__new__(GroupedLinear)
        nn.Module.__init__(found)
        found.__dict__.update({name: value for name, value in vars(self).items() if not name.startswith("_")})
        found.bias = self.bias
        zeros = self.zeros - self.scaling * (self.up @ self.down) / self.scales
        for name, value in (("codes", self.codes), ("scales", self.scales), ("zeros", zeros)):
            found.register_buffer(name, value, persistent=False)
        return found

    def whole(self) -> Tensor:
        """Return the weight with the adapter in it."""
        return self.folded().whole()


class TrainedScales(GroupedLinear):
    """A held layer whose scales train."""

    def __init__(self, layer: nn.Linear, bits: int, group: int | None) -> None:
        super().__init__(layer, bits, group)
        scales = self.scales
        del self.scales
        self.scales = nn.Parameter(scales)

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        return TrainedProduct.of(x, self.scales, self)

    def gradient_of(self, grad_OI: Tensor) -> Tensor:
        """Return the scales' gradient, of that of the weight."""
        padded = functional.pad(grad_OI, (0, self.groups * self.group - self.in_features))
        grouped = padded.view(self.out_features, self.groups, self.group)
        return self.levels(grad_OI.dtype).mul_(grouped).sum(-1, dtype=torch.float32)


class TrainedProduct(torch.autograd.Function):
    """x Wᵀ for a weight that is made where it is needed, with a gradient of what it is made from."""

    @classmethod
    def of(cls, x: Tensor, trained: Tensor, layer: Any) -> Tensor:
        """Return x Wᵀ + b in the precision of autocast, or of x; `layer.gradient_of` turns W's gradient (outputs,
        inputs) into that of `trained`."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        found: Tensor = cls.apply(x.to(dtype), trained, layer)
        return found if layer.bias is None else found + layer.bias.to(dtype)

    @staticmethod
    def forward(ctx: Any, x: Tensor, trained: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return functional.linear(x, layer.weight_as(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (x,) = ctx.saved_tensors
        over = grad @ ctx.layer.weight_as(grad.dtype) if ctx.needs_input_grad[0] else None
        return over, ctx.layer.gradient_of(grad.flatten(0, -2).T @ x.flatten(0, -2)), None


class HeldAdam(Adam):
    """AdamW over what trains beside held layers."""

    def tensors(self) -> dict[str, Tensor]:
        """Return moments, what trains and what is held; the names say that they are no plain model's."""
        found = {**super().tensors(), **{f"trained.{name}": item.detach() for name, item in self.weights().items()}}
        return {HELD + name: value for name, value in (found | self._numbers()).items()}

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take the moments over and, from a checkpoint, what trains and what is held."""
        found = {name.removeprefix(HELD): value for name, value in tensors.items()}
        super().restore(plain, found)
        mine = {**{f"trained.{name}": item for name, item in self.weights().items()}, **self._numbers()}
        with torch.no_grad():
            for name in mine if any(name.startswith(HELD) for name in tensors) else ():
                mine[name].copy_(found[name])

    def _numbers(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, layer in self.model.named_modules()
            if isinstance(layer, GroupedLinear)
            for key, value in layer.named_buffers(recurse=False)
        }
