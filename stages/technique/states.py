"""AdamW whose two moments are held in 8 bits: 2.03 bytes a parameter instead of 8.

Blocks of 256 numbers share one scale; a number is one of 256 steps of a dynamic code (Dettmers et al. 2022, arXiv
2110.02861, section 2). The update itself is bitsandbytes' kernel, in float32; tensors of fewer than 4,096 numbers keep
float32 moments and are updated by torch's AdamW formula. Large tensors are updated piece by piece, so that the
kernel's copies (on a CPU seven float32 numbers a parameter) stay small. Which states a run uses is the plan's decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from data_contracts.errors import ConfigError

BLOCK, LEAST = 256, 4096
PIECE = 2**22
"""Numbers updated at once; a multiple of `BLOCK`."""


def has_8bit() -> bool:
    """Return whether bitsandbytes is installed (the extra `quantised`)."""
    return find_spec("bitsandbytes") is not None


def scratch_bytes(numbers: int, device: str) -> int:
    """Return what the kernel holds beside the tensors of a parameter of so many numbers: on a CPU moments, gradient,
    weights and denominators of a piece in float32, on an accelerator nothing."""
    return 7 * 4 * min(PIECE, numbers) if device == "cpu" else 0


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise ConfigError(
            "bitsandbytes is installed where optimizer states are held in 8 bits",
            str(error),
            "pip install 'lazytrain[quantised]', or leave `states_8bit` out of `plan.savings`",
        ) from error
    return bitsandbytes.functional


@lru_cache(maxsize=1)
def code_values() -> tuple[list[float], list[float]]:
    """Return the 256 values of a first (signed) and of a second moment, 1 the largest."""
    create = _library().create_dynamic_map
    return create(signed=True).tolist(), create(signed=False).tolist()


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments; arguments as torch's.

    A parameter's state holds `step` and, with 8 bits, uint8 `exp_avg` and `exp_avg_sq` with float32 `exp_avg_scale` and
    `exp_avg_sq_scale`, one number a block; with fewer than `LEAST` numbers, float32 `exp_avg` and `exp_avg_sq`.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._codes: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.piece = PIECE
        for group in self.param_groups:
            for parameter in group["params"]:
                self.codes(parameter.device)  # now, so that a missing library is told before anything is trained

    def codes(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the 256 values of a first and of a second moment, float32."""
        if device not in self._codes:
            first, second = code_values()
            self._codes[device] = (torch.tensor(first, device=device), torch.tensor(second, device=device))
        return self._codes[device]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(empty_state(parameter))
                    state["step"] += 1
                    if "exp_avg_scale" in state:
                        self._update(parameter, state, group)
                    else:
                        _update_float32(parameter, state, group)

    def _update(self, parameter: nn.Parameter, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        first, second = self.codes(parameter.device)
        weights, gradient = parameter.view(-1), parameter.grad.contiguous().view(-1)  # type: ignore[union-attr]
        (beta1, beta2), step = group["betas"], state["step"]
        moments = [state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)]
        for start in range(0, weights.numel(), self.piece):
            piece, blocks = slice(start, start + self.piece), slice(start // BLOCK, (start + self.piece) // BLOCK)
            torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
                "adam", gradient[piece], weights[piece], moments[0][piece], moments[1][piece], beta1, beta2, 0.0, 0.0,
                group["eps"], step, group["lr"], first, second, state["exp_avg_scale"][blocks],
                state["exp_avg_sq_scale"][blocks], group["weight_decay"], 1.0, False,
            )  # fmt: skip


def _update_float32(parameter: nn.Parameter, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    (beta1, beta2), step, gradient = group["betas"], state["step"], parameter.grad
    average, square = state["exp_avg"], state["exp_avg_sq"]
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    average.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    parameter.addcdiv_(average, root, value=-group["lr"] / (1 - beta1**step))


def empty_state(parameter: Tensor) -> dict[str, Any]:
    """Return the state of a parameter that was never updated."""
    if parameter.numel() < LEAST:
        return {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    blocks, device = math.ceil(parameter.numel() / BLOCK), parameter.device
    state: dict[str, Any] = {"step": 0}
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
        state[f"{name}_scale"] = torch.zeros(blocks, dtype=torch.float32, device=device)
    return state


def encode(optimizer: AdamW8bit, parameter: Tensor, average: Tensor, square: Tensor, updates: int) -> dict[str, Any]:
    """Return the state that holds float32 moments as nearly as 8 bits can."""
    state = empty_state(parameter)
    state["step"] = updates
    codes = optimizer.codes(parameter.device)
    for name, given, code in zip(("exp_avg", "exp_avg_sq"), (average, square), codes, strict=True):
        value = given.to(parameter.device, torch.float32)
        if f"{name}_scale" in state:
            found, scale = torch.ops.bitsandbytes.quantize_blockwise(value.contiguous(), code, BLOCK)
            state[name].copy_(found.view_as(value))
            state[f"{name}_scale"].copy_(scale)
        else:
            state[name].copy_(value)
    return state


def decode(optimizer: AdamW8bit, parameter: Tensor, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return (exp_avg, exp_avg_sq) of a state in float32, of the parameter's shape."""
    if "exp_avg_scale" not in state:
        return state["exp_avg"], state["exp_avg_sq"]
    average, square = (
        torch.ops.bitsandbytes.dequantize_blockwise(state[name], state[f"{name}_scale"], code, BLOCK, torch.float32)
        for name, code in zip(("exp_avg", "exp_avg_sq"), optimizer.codes(parameter.device), strict=True)
    )
    return average.view_as(parameter), square.view_as(parameter)
