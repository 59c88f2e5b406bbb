"""Which decoder blocks keep their activations and which compute them again in the backward pass.

A block is what transformers marks as one (`GradientCheckpointingLayer`). A recomputed block keeps its input alone; what
comes out of it is the same to the bit, dropout included. Choosing the blocks is the plan's part.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from data_contracts.errors import ModelError
from stages.model.loss import plain


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the decoder's blocks in the order they run; empty where transformers marks none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in plain(model).modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute(model: Any, places: Collection[int]) -> None:
    """Let exactly the blocks at `places` (0-based) compute their activations again in the backward pass.

    Raises `ModelError` for a place that the model has no block at.
    """
    blocks = blocks_of(model)
    if places and not max(places) < len(blocks):
        raise ModelError(
            "every block that is to be recomputed exists",
            f"block {max(places)} was asked for and {type(plain(model)).__name__} marks {len(blocks)}",
            "leave `recompute` out of `plan.savings` for this model",
        )
    for place, block in enumerate(blocks):
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
        block.gradient_checkpointing = place in places  # type: ignore[assignment]
