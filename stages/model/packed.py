"""Linear layers held in eight or four bits that can be taken out, trained and packed again.

Blocks of 64 numbers share a scale: eight bits are integers of ±127 steps, four bits the NF4 code. Packing rounds to the
nearest code, or stochastically, so that what was learnt below a step survives in the mean: E[packed] = weight. What was
packed packs to itself again, to the bit. Half a byte or a byte a weight, and half a bit for scales.
Source: NF4's code, Dettmers et al. 2023 (QLoRA), appendix E; stochastic rounding, Zhao et al. 2024 (arXiv 2412.04787).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.model.nf4 import FrozenProduct

BLOCK, STEPS = 64, 127
Bits = Literal[4, 8]
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_NEAR = 1e-4
"""A number so near to a code (in steps) is that code: dequantising and scaling again may miss it by a rounding."""


class HeldLinear(nn.Module):
    """A linear layer that holds its weight (outputs, inputs) in few bits; only its input gets a gradient.

    Its state is that of a plain layer: `state_dict` gives the whole weight, in main memory.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that is held."""
        raise TypeError(f"{type(self).__name__} defines no weight_as")

    def whole(self) -> Tensor:
        """Return, in float32, the weight of a plain layer that computes what this one does."""
        return self.weight_as(torch.float32).contiguous()

    def plain(self) -> nn.Linear:
        """Return that plain layer, frozen."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.whole(), requires_grad=False)
        layer.bias = self.bias
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        return FrozenProduct.of(x, self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.whole().detach().cpu()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()


class PackedLinear(HeldLinear):
    """A linear layer held in eight bits, or in four (NF4).

    Args:
        layer: is packed; on the meta device its shapes alone.
        bits: 8 or 4.
        uniform: draws in [0, 1), as many as weights, for stochastic rounding; None rounds to the nearest.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear, bits: Bits, uniform: Tensor | None = None) -> None:
        super().__init__(layer)
        self.bits = bits
        codes, scales = pack(layer.weight.detach(), bits, uniform)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that is held."""
        numbers = self.out_features * self.in_features
        if self.bits == 8:
            values = self.codes.to(dtype)
        else:
            code = torch.tensor(NF4, dtype=dtype, device=self.codes.device)
            both = torch.stack([self.codes >> 4, self.codes & 15], dim=-1)
            values = code.index_select(0, both.flatten().int()).view(-1, BLOCK)  # indexing would make them 64 bits wide
        return values.mul_(self.scales.to(dtype)).flatten()[:numbers].view(self.out_features, self.in_features)


def pack(weight: Tensor, bits: Bits, uniform: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (codes, scales of shape (blocks, 1)) of a weight; see the class for the arguments.

    Codes are int8 of shape (blocks, 64), or uint8 of shape (blocks, 32) with the earlier of two in the upper half.
    """
    flat = weight.float().flatten()
    flat = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = flat.abs().amax(dim=1, keepdim=True)
    if bits == 8:  # twelve bits of a scale are dropped, so that a code times it is exact and the largest is ±127 again
        scales = ((largest / STEPS).view(torch.int32) & -4096).view(torch.float32)
        place = (flat / scales.masked_fill(scales == 0, 1)).clamp_(-STEPS, STEPS)
        lower = place.floor()
        codes = lower.add_(_upwards(place - lower, uniform))
        return codes.clamp_(-STEPS, STEPS).to(torch.int8), scales
    code = torch.tensor(NF4, dtype=torch.float32, device=weight.device)
    place = flat / largest.masked_fill(largest == 0, 1)
    lower = (torch.bucketize(place, code, right=True) - 1).clamp_(0, len(NF4) - 2)
    share = (place - code[lower]) / (code[lower + 1] - code[lower])
    codes = (lower + _upwards(share, uniform)).clamp_(0, len(NF4) - 1).to(torch.uint8)
    return (codes[:, ::2] << 4) | codes[:, 1::2], largest


def _upwards(share: Tensor, uniform: Tensor | None) -> Tensor:
    """Return 1 where a number between two codes takes the upper one, `share` of the way from the lower to it."""
    if uniform is None:
        return (share > 0.5).to(torch.int8)
    draws = functional.pad(uniform.flatten(), (0, share.numel() - uniform.numel())).view_as(share)
    return ((draws < share) & (share > _NEAR) | (share > 1 - _NEAR)).to(torch.int8)


def linears(layer: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    """Yield (parent, its name for the child, name in `layer`, child) of every plain or held linear layer inside."""
    for path, parent in list(layer.named_modules()):
        for key, child in list(parent.named_children()):
            if type(child) is nn.Linear or isinstance(child, HeldLinear):
                yield parent, key, f"{path}.{key}" if path else key, child


def hold(layer: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put what `make` gives in the place of every plain linear layer inside."""
    for parent, key, _, child in linears(layer):
        if isinstance(child, nn.Linear):
            setattr(parent, key, make(child))


def release_packed(model: nn.Module) -> None:
    """Replace every held layer by a plain one with the weight that was held, in place."""
    for parent, key, _, child in linears(model):
        if isinstance(child, HeldLinear):
            setattr(parent, key, child.plain())
