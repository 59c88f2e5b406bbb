"""Adam-mini: one second moment a block of a matrix instead of one a number: 4 bytes a parameter instead of 8.

v is the moving mean of the block's mean squared gradient. A block is what the loss's curvature keeps together: a head
of the queries and of the keys, an output of any other matrix, a token of the embedding or of the head. Vectors have
plain AdamW. Which rows are a head's is read from the attention's own modules and the model's head size, so that keys
shared by several queries have their own number of heads.
Source: Zhang et al. 2024 (arXiv 2406.16793), algorithms 1 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stages.model.loss import plain
from stages.technique.states import HeldAdamW

HEADS = ("q_proj", "k_proj")
"""Names that transformers gives the linear layers of queries and keys."""


def head_rows(model: nn.Module) -> dict[Tensor, int]:
    """Return how many rows a block of each query's or key's weight has, where they are split into heads."""
    config = plain(model).config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        module.weight: int(size)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in HEADS and isinstance(getattr(module, "weight", None), nn.Parameter)
        if module.weight.shape[0] % size == 0
    }


class AdamMini(HeldAdamW):
    """AdamW with one second moment a block.

    A matrix's state holds float32 `exp_avg` of its shape and `exp_avg_sq`, one number a block.

    Args:
        params, settings: as of `HeldAdamW`.
        rows: of a block, by parameter; one where not given.
    """

    def __init__(self, params: Iterable[Any], rows: Mapping[Tensor, int], **settings: Any) -> None:
        super().__init__(params, **settings)
        self._rows = dict(rows)

    def _blocks(self, parameter: Tensor) -> int:
        return parameter.shape[0] // self._rows.get(parameter, 1)

    def update(self, parameter: nn.Parameter, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Move one parameter and its moments."""
        if parameter.ndim < 2:
            return super().update(parameter, state, group)
        (beta1, beta2), step = group["betas"], state["step"]
        blocks = self._blocks(parameter)
        gradient = parameter.grad.reshape(blocks, -1)  # type: ignore[union-attr]
        mean = torch.linalg.vector_norm(gradient, dim=1).square_().div_(gradient.shape[1])
        average = state["exp_avg"].view(blocks, -1).lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).add_(mean, alpha=1 - beta2)
        root = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.view(blocks, -1).addcdiv_(average, root[:, None], value=-group["lr"] / (1 - beta1**step))
        return None

    def scratch(self, parameter: Tensor, device: str) -> int:
        """Return the bytes that `update` holds beside a matrix, its gradient and its moments: three numbers a block."""
        return 12 * self._blocks(parameter) if parameter.ndim >= 2 else super().scratch(parameter, device)

    def empty_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter that was never updated."""
        if parameter.ndim < 2:
            return super().empty_state(parameter)
        square = torch.zeros(self._blocks(parameter), dtype=torch.float32, device=parameter.device)
        return {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": square}

    def encode(self, parameter: Tensor, average: Tensor, square: Tensor, updates: int) -> dict[str, Any]:
        """Return the state whose second moments are the blocks' means."""
        if parameter.ndim >= 2:
            square = square.reshape(self._blocks(parameter), -1).mean(1)
        return super().encode(parameter, average, square, updates)

    def decode(self, parameter: Tensor, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return (exp_avg, exp_avg_sq), of the parameter's shape."""
        square = state["exp_avg_sq"]
        if parameter.ndim >= 2:
            square = square[:, None].expand(-1, parameter.numel() // len(square)).reshape(parameter.shape)
        return state["exp_avg"], square
