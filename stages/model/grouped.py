"""Linear layers whose weights are whole numbers of n bits, with a scale a group of inputs: W = s (q - z).

A group is `group` neighbouring inputs of one output. The zero point z is a whole number a group, or, in a symmetric
layer, the middle of the numbers and not held. Rounding is to the nearest, with the group's range (0 inside it) as the
numbers' range, or stochastic, with E[s (q - z)] = W. What trains (nothing, here) is a subclass's to say.
Sources: rounding by the range, Kim et al. 2023 (PEQA, arXiv 2305.14152), equation 1; stochastically, Zhao et al. 2024
(DQT, arXiv 2412.04787), section 3, by a group's largest magnitude; by its largest value, as there, weights would drift.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.model.bits import pack_bits, unpack_bits
from stages.model.packed import HeldLinear

PIECE = 2**20
"""Numbers rounded at once: what rounding holds beside a weight stays small."""


class GroupedLinear(HeldLinear):
    """A linear layer of a weight (outputs, inputs) held in `bits`; only its input gets a gradient.

    Args:
        layer: is quantised; on the meta device its shapes alone.
        bits: of a number, 2 to 8.
        group: inputs that share a scale; None is all of them. A last group may be shorter.
        symmetric: no zero points; numbers reach from -(2^(bits-1) - 1) to 2^(bits-1) - 1.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(self, layer: nn.Linear, bits: int, group: int | None, *, symmetric: bool = False) -> None:
        super().__init__(layer)
        self.bits, self.group, self.symmetric = bits, min(group or self.in_features, self.in_features), symmetric
        self.groups = -(-self.in_features // self.group)
        weight = layer.weight.detach().float()
        numbers = self.out_features * self.groups * self.group
        self.register_buffer("codes", pack_bits(weight.new_zeros(numbers, dtype=torch.uint8), bits), persistent=False)
        self.register_buffer("scales", weight.new_zeros(self.out_features, self.groups), persistent=False)
        zeros = None if symmetric else weight.new_zeros(self.out_features, self.groups, dtype=torch.uint8)
        self.register_buffer("zeros", zeros, persistent=False)
        self.hold(weight)

    @property
    def middle(self) -> int:
        """The number that stands for 0 in a symmetric layer, and the steps on either side of it."""
        return 2 ** (self.bits - 1) - 1

    @torch.no_grad()
    def hold(self, weight: Tensor, source: torch.Generator | None = None) -> None:
        """Take `weight` (outputs, inputs), float32, over in place; with `source`, rounded stochastically by its draws.

        Which draws meet which number depends on the shape alone.
        """
        rows = max(1, PIECE // (self.groups * self.group))
        pieces = []
        for start in range(0, self.out_features, rows):
            part = functional.pad(weight[start : start + rows], (0, self.groups * self.group - self.in_features))
            level = part.view(-1, self.groups, self.group)
            scales, zeros = self._range(level)
            level = _rounded(level / scales[..., None], source).add_(zeros[..., None])
            pieces.append(level.clamp_(0, 2 * self.middle + (not self.symmetric)).to(torch.uint8))
            self.scales.data[start : start + rows] = scales
            if self.zeros is not None:
                self.zeros[start : start + rows] = zeros
        self.codes.copy_(pack_bits(torch.cat(pieces), self.bits))

    def _range(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales and zero points of weights (rows, groups, group)."""
        if self.symmetric:
            scales = level.abs().amax(-1) / self.middle
            return scales.masked_fill(scales == 0, 1.0), torch.full_like(scales, self.middle)
        low, high = level.amin(-1).clamp_(max=0), level.amax(-1).clamp_(min=0)
        scales = (high - low) / (2**self.bits - 1)
        scales = scales.masked_fill(scales == 0, 1.0)
        return scales, (-low / scales).round_()

    def levels(self, dtype: torch.dtype) -> Tensor:
        """Return q - z, shape (outputs, groups, group)."""
        shape = (self.out_features, self.groups, self.group)
        found = unpack_bits(self.codes, self.bits, self.out_features * self.groups * self.group).view(shape).to(dtype)
        return found.sub_(self.middle if self.zeros is None else self.zeros.to(dtype)[..., None])

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that is held."""
        return self.levels(dtype).mul_(self.scales.detach().to(dtype)[..., None]).flatten(1)[:, : self.in_features]


def _rounded(level: Tensor, source: torch.Generator | None) -> Tensor:
    if source is None:
        return level.round_()
    lower = level.floor()
    share = level.sub_(lower)
    return lower.add_(torch.rand(share.shape, generator=source, device=share.device) < share)
