"""AdamW whose two moments are held in another form than float32, and the one of 8 bits: 2.03 bytes a parameter, not 8.

Blocks of 256 numbers share one scale; a number is one of 256 steps of a dynamic code (Dettmers et al. 2022, arXiv
2110.02861, section 2). The update itself is bitsandbytes' kernel, in float32; tensors of fewer than 4,096 numbers keep
float32 moments and are updated by torch's AdamW formula. Large tensors are updated piece by piece, so that the
kernel's copies (on a CPU five float32 numbers a parameter) stay small. Which states a run uses is the plan's decision.
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
PIECE = 2**20
"""Numbers updated at once; a multiple of `BLOCK`."""


def has_8bit() -> bool:
    """Return whether bitsandbytes is installed (the extra `quantised`)."""
    return find_spec("bitsandbytes") is not None


def scratch_bytes(numbers: int, device: str) -> int:
    """Return what the kernel holds beside the tensors of a parameter of so many numbers: on a CPU both moments, the
    gradient and two terms of the denominator of a piece in float32, on an accelerator nothing."""
    return 5 * 4 * min(PIECE, numbers) if device == "cpu" else 0


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


class HeldAdamW(torch.optim.Optimizer):
    """AdamW; arguments as torch's. A form says how a parameter's state is held and updated; `step` is the number of its
    updates. Where a form leaves a parameter alone, float32 `exp_avg` and `exp_avg_sq` are updated by torch's formula.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(self.empty_state(parameter))
                    state["step"] += 1
                    self.update(parameter, state, group)

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Move one parameter and its moments."""
        update_float32(parameter, state, group)

    def scratch(self, parameter: Tensor, device: str) -> int:
        """Return the bytes that `update` holds beside a parameter, its gradient and its moments."""
        return 4 * parameter.numel()

    def empty_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter that was never updated."""
        return {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def encode(self, parameter: Tensor, average: Tensor, square: Tensor, updates: int) -> dict[str, Any]:
        """Return the state that holds float32 moments as nearly as the form can."""
        state = self.empty_state(parameter) | {"step": updates}
        state["exp_avg"].copy_(average)
        state["exp_avg_sq"].copy_(square)
        return state

    def decode(self, parameter: Tensor, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return (exp_avg, exp_avg_sq) of a state in float32, of the parameter's shape."""
        return state["exp_avg"], state["exp_avg_sq"]


class AdamW8bit(HeldAdamW):
    """AdamW with 8-bit moments.

    A parameter's state holds uint8 `exp_avg` and `exp_avg_sq` with float32 `exp_avg_scale` and `exp_avg_sq_scale`, one
    number a block; with fewer than `LEAST` numbers, float32 `exp_avg` and `exp_avg_sq`.
    """

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
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

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Move one parameter and its moments, piece by piece."""
        if "exp_avg_scale" not in state:
            return super().update(parameter, state, group)
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
        return None

    def scratch(self, parameter: Tensor, device: str) -> int:
        """Return the bytes that the kernel holds beside a parameter, its gradient and its moments."""
        small = parameter.numel() < LEAST
        return super().scratch(parameter, device) if small else scratch_bytes(parameter.numel(), device)

    def empty_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter that was never updated."""
        if parameter.numel() < LEAST:
            return super().empty_state(parameter)
        blocks, device = math.ceil(parameter.numel() / BLOCK), parameter.device
        state: dict[str, Any] = {"step": 0}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"{name}_scale"] = torch.zeros(blocks, dtype=torch.float32, device=device)
        return state

    def encode(self, parameter: Tensor, average: Tensor, square: Tensor, updates: int) -> dict[str, Any]:
        """Return the state that holds float32 moments as nearly as 8 bits can."""
        if parameter.numel() < LEAST:
            return super().encode(parameter, average, square, updates)
        state = self.empty_state(parameter) | {"step": updates}
        codes = self.codes(parameter.device)
        for name, given, code in zip(("exp_avg", "exp_avg_sq"), (average, square), codes, strict=True):
            value = given.to(parameter.device, torch.float32)
            found, scale = torch.ops.bitsandbytes.quantize_blockwise(value.contiguous(), code, BLOCK)
            state[name].copy_(found.view_as(value))
            state[f"{name}_scale"].copy_(scale)
        return state

    def decode(self, parameter: Tensor, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return (exp_avg, exp_avg_sq) of a state in float32, of the parameter's shape."""
        if "exp_avg_scale" not in state:
            return super().decode(parameter, state)
        average, square = (
            torch.ops.bitsandbytes.dequantize_blockwise(state[name], state[f"{name}_scale"], code, BLOCK, torch.float32)
            for name, code in zip(("exp_avg", "exp_avg_sq"), self.codes(parameter.device), strict=True)
        )
        return average.view_as(parameter), square.view_as(parameter)


def update_float32(parameter: nn.Parameter, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Update a parameter with float32 moments as torch's AdamW does."""
    (beta1, beta2), step, gradient = group["betas"], state["step"], parameter.grad
    average, square = state["exp_avg"], state["exp_avg_sq"]
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    average.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    parameter.addcdiv_(average, root, value=-group["lr"] / (1 - beta1**step))
