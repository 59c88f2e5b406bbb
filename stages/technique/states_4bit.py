"""AdamW whose two moments are held in 4 bits: 1.06 bytes a parameter instead of 8.

Blocks of 128 numbers share one float32 scale, their largest magnitude. A first moment is one of 16 values of a dynamic
code with signs, a second one of k / 16, k from 1 to 16: without a zero, which the update would divide by. Tensors of
fewer than 4,096 numbers, or of no whole blocks, keep float32 moments. Plain tensor operations, piece by piece, so it
needs no library and runs where torch does; formulas and codes are those of torchao's `AdamW4bit`.
Source: Li, Chen & Zhu 2023 (Memory Efficient Optimizers with 4-bit States, arXiv 2309.01507), section 4, without its
rank-1 scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stages.technique.states import LEAST, HeldAdamW

BLOCK = 128
SIGNED = (
    -0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0.0,
    0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0,
)  # fmt: skip
"""The dynamic code of 4 bits (Dettmers et al. 2022, section 2.2): a decade for each leading zero, means between."""
UNSIGNED = tuple(number / 16 for number in range(1, 17))
PIECE, MOST_PIECES = 2**20, 16
"""Numbers updated at once, and how many pieces a tensor has at most."""


class AdamW4bit(HeldAdamW):
    """AdamW with 4-bit moments.

    A parameter's state holds uint8 `exp_avg` and `exp_avg_sq`, two numbers a byte, the earlier in its upper half, with
    float32 `exp_avg_scale` and `exp_avg_sq_scale`, one number a block.
    """

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Move one parameter and its moments, piece by piece; the moments that move it are not rounded yet."""
        if "exp_avg_scale" not in state:
            return super().update(parameter, state, group)
        (beta1, beta2), step = group["betas"], state["step"]
        weights, gradient = parameter.view(-1), parameter.grad.contiguous().view(-1)  # type: ignore[union-attr]
        size = _piece(len(weights))
        for start in range(0, len(weights), size):
            piece, given = weights[start : start + size], gradient[start : start + size]
            parts = slice(start // 2, (start + size) // 2), slice(start // BLOCK, (start + size) // BLOCK)
            codes = state["exp_avg"][parts[0]], state["exp_avg_sq"][parts[0]]
            scales = state["exp_avg_scale"][parts[1]], state["exp_avg_sq_scale"][parts[1]]
            average = _decoded(codes[0], scales[0], SIGNED).lerp_(given, 1 - beta1)
            _encode(average, codes[0], scales[0], SIGNED)
            square = _decoded(codes[1], scales[1], UNSIGNED).mul_(beta2).addcmul_(given, given, value=1 - beta2)
            _encode(square, codes[1], scales[1], UNSIGNED)
            root = square.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
            piece.mul_(1 - group["lr"] * group["weight_decay"])
            piece.addcdiv_(average, root, value=-group["lr"] / (1 - beta1**step))
            del average, square, root  # before the next piece's
        return None

    def scratch(self, parameter: Tensor, device: str) -> int:
        """Return the bytes that `update` holds beside a parameter, its gradient and its moments: while a piece's second
        moments are encoded both float32 moments, the scaled ones and their codes."""
        numbers = parameter.numel()
        if numbers < LEAST or numbers % BLOCK:
            return super().scratch(parameter, device)
        return 16 * min(numbers, _piece(numbers))

    def empty_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter that was never updated."""
        numbers = parameter.numel()
        if numbers < LEAST or numbers % BLOCK:
            return super().empty_state(parameter)
        state: dict[str, Any] = {"step": 0}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(numbers // 2, dtype=torch.uint8, device=parameter.device)
            state[f"{name}_scale"] = torch.zeros(numbers // BLOCK, device=parameter.device)
        return state

    def encode(self, parameter: Tensor, average: Tensor, square: Tensor, updates: int) -> dict[str, Any]:
        """Return the state that holds float32 moments as nearly as 4 bits can."""
        state = self.empty_state(parameter) | {"step": updates}
        if "exp_avg_scale" not in state:
            return super().encode(parameter, average, square, updates)
        for name, given, code in (("exp_avg", average, SIGNED), ("exp_avg_sq", square, UNSIGNED)):
            value = given.to(parameter.device, torch.float32).contiguous().view(-1)
            _encode(value, state[name], state[f"{name}_scale"], code)
        return state

    def decode(self, parameter: Tensor, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return (exp_avg, exp_avg_sq) of a state in float32, of the parameter's shape."""
        if "exp_avg_scale" not in state:
            return super().decode(parameter, state)
        average = _decoded(state["exp_avg"], state["exp_avg_scale"], SIGNED)
        square = _decoded(state["exp_avg_sq"], state["exp_avg_sq_scale"], UNSIGNED)
        return average.view_as(parameter), square.view_as(parameter)


def _piece(numbers: int) -> int:
    """Return how many of a tensor's numbers are updated at once, in whole blocks."""
    return max(PIECE, math.ceil(numbers / MOST_PIECES / BLOCK) * BLOCK)


def _decoded(codes: Tensor, scales: Tensor, code: tuple[float, ...]) -> Tensor:
    values = torch.tensor(code, device=codes.device)
    both = torch.stack([codes >> 4, codes & 15], dim=-1).flatten().int()
    return values.index_select(0, both).view(-1, BLOCK).mul_(scales[:, None]).flatten()


def _encode(value: Tensor, codes: Tensor, scales: Tensor, code: tuple[float, ...]) -> None:
    """Write the nearest codes of `value`, and its blocks' scales, in place."""
    blocks = value.view(-1, BLOCK)
    scales.copy_(torch.linalg.vector_norm(blocks, math.inf, dim=1).clamp_(min=1e-12))
    borders = torch.tensor([(low + high) / 2 for low, high in pairwise(code)], device=value.device)
    found = torch.bucketize(blocks / scales[:, None], borders, out_int32=True, right=True).to(torch.uint8).view(-1, 2)
    codes.copy_(found[:, 0].bitwise_left_shift(4).bitwise_or_(found[:, 1]))
