"""Frozen linear layers in four bits (NF4): an eighth of float32's memory, a little less with doubly quantised scales.

Weights alone are quantised, blocks of 64 with a scale each (where `double`, eight bits about the scales' mean, in
blocks of 256), and are dequantised layer by layer where they are used, forward and backward, in the activations' own
precision, so a loss stays smooth in everything else and gradients are those of the model that is held. That is another
model than the one given, a little; `release_from_nf4` makes it a plain one.
Source: Dettmers et al. 2023 (QLoRA), section 3; codes are made by bitsandbytes, on any device it has kernels for.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from data_contracts.errors import MethodError
from stages.model.loss import plain

BLOCK, SCALE_BLOCK = 64, 256


class Nf4Linear(nn.Module):
    """A linear layer whose weight of shape (outputs, inputs) is held in four bits; only its input gets a gradient.

    On the meta device it has the shapes that quantising would give.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear, double: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.twice = layer.in_features, layer.out_features, double
        self.bias = layer.bias
        for name, value in _quantised(layer.weight.detach(), double).items():
            self.register_buffer(name, value, persistent=False)

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that is held."""
        operators: Any = torch.ops.bitsandbytes
        scales = self.scales
        if self.twice:
            scales = operators.dequantize_blockwise(
                scales, self.outer_scales, self.scale_code, SCALE_BLOCK, torch.float32
            )
            scales = scales + self.scale_mean
        shape = [self.out_features, self.in_features]
        exact = torch.float32 if dtype == torch.float64 else dtype
        found: Tensor = operators.dequantize_4bit(self.codes, scales, BLOCK, "nf4", shape, exact)
        return found.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        return FrozenProduct.of(x, self)


class Held(Protocol):
    """A layer whose weight is made where it is needed."""

    bias: Any

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, shape (outputs, inputs)."""


class FrozenProduct(torch.autograd.Function):
    """x Wᵀ for a weight that is made where it is needed, forward and backward, and never saved."""

    @classmethod
    def of(cls, x: Tensor, layer: Held) -> Tensor:
        """Return x Wᵀ + b in the precision of autocast, or of x."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        found: Tensor = cls.apply(x.to(dtype), layer)
        return found if layer.bias is None else found + layer.bias.to(dtype)

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Held) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.weight_as(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.weight_as(grad.dtype), None


def hold_in_nf4(model: Any, *, double: bool = True) -> int:
    """Replace every frozen linear layer but the output head by its four-bit form, in place; return how many have it.

    Raises `MethodError` where bitsandbytes is not installed or the model has no frozen linear layer.
    """
    if find_spec("bitsandbytes") is None:
        raise MethodError(
            "bitsandbytes is installed, to hold frozen layers in four bits",
            "it is not",
            "pip install 'lazytrain[quantised]'",
        )
    import bitsandbytes  # noqa: F401 - registers its operators with torch

    head = plain(model).get_output_embeddings()
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not head and not any(p.requires_grad for p in child.parameters())
    ]
    already = sum(isinstance(module, Nf4Linear) for module in model.modules())
    if not found and not already:
        raise MethodError(
            "a model with frozen linear layers",
            "all of its linear layers train",
            "use a checkpoint trained with `lora`",
        )
    for parent, name, layer in found:
        setattr(parent, name, Nf4Linear(layer, double))
    return already + len(found)


def held_in_nf4(model: nn.Module) -> str | None:
    """Return "nf4_double" or "nf4" where layers of `model` are held so, else None."""
    kinds = {module.twice for module in model.modules() if isinstance(module, Nf4Linear)}
    return None if not kinds else "nf4_double" if True in kinds else "nf4"


def release_from_nf4(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Replace every layer that is held in four bits by a plain one with the weight that was held, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Nf4Linear):
                layer = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                layer.weight = nn.Parameter(child.weight_as(dtype), requires_grad=False)
                layer.bias = child.bias
                setattr(parent, name, layer)


def _quantised(weight: Tensor, double: bool) -> dict[str, Tensor]:
    if weight.device.type == "meta":
        return _shapes(weight.numel(), double)
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(
        weight.float(), blocksize=BLOCK, compress_statistics=double, quant_type="nf4", quant_storage=torch.uint8
    )
    found = {"codes": codes, "scales": state.absmax}
    if double:
        inner = state.state2
        found |= {"outer_scales": inner.absmax, "scale_code": inner.code, "scale_mean": state.offset}
    return found


def _shapes(numbers: int, double: bool) -> dict[str, Tensor]:
    blocks = -(-numbers // BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    found = {"codes": empty(-(-numbers // 2), 1, dtype=torch.uint8)}
    if not double:
        return found | {"scales": empty(blocks)}
    return found | {
        "scales": empty(blocks, dtype=torch.uint8),
        "outer_scales": empty(-(-blocks // SCALE_BLOCK)),
        "scale_code": empty(256),
        "scale_mean": empty(),
    }
