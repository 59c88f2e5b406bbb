"""APOLLO: all weights train by scaled gradients; the scales are read off Adam's moments in a random low-rank space.

Moments take 2 r numbers a column instead of 2 m, and the random projection is drawn again from a seed; the gradient
itself is whole. With `tensor_wise` and rank 1 (APOLLO-Mini) two numbers a column are kept; its scale is 128.
Source: Zhu et al. 2024 (arXiv 2412.05270), algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from data_contracts.config import Saving
from stages.technique.base import InPlace

if TYPE_CHECKING:
    from torch import nn

    from data_contracts.config import TrainConfig
    from stages.technique.optimizer import Optimizer
    from stages.technique.step import States


class Apollo(InPlace):
    """Train every parameter by gradients that are scaled as a low-rank Adam would scale them."""

    learning_rate: ClassVar[float] = 1e-4
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"recompute", "chunked_loss"})

    rank: int = Field(64, ge=1, le=8192, description="Of the space (r); matrices of a smaller side have plain AdamW.")
    gap: int = Field(200, ge=1, le=100_000, description="Updates between two projections (T).")
    scale: float = Field(1.0, gt=0, le=4096, description="Of the update; its root multiplies the gradient.")
    tensor_wise: bool = Field(False, description="One scale a matrix instead of one a column (APOLLO-Mini).")

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return Adam in a low-rank space."""
        from stages.technique.projected import Projected

        return Projected(
            model,
            train,
            kind="apollo",
            rank=self.rank,
            gap=self.gap,
            scale=self.scale,
            tensor_wise=self.tensor_wise,
            seed=seed,
        )
