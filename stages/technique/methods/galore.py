"""GaLore: all weights train, with Adam's moments in the leading directions of each matrix's gradient.

Moments take 2 r numbers a column instead of 2 m, and a basis of r a row is kept; the gradient itself is whole. Singular
vectors are made anew every `gap` updates, which takes its time.
Source: Zhao et al. 2024 (arXiv 2403.03507), algorithm 2; defaults of its fine-tuning.
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


class Galore(InPlace):
    """Train every parameter, matrices in low-rank directions."""

    learning_rate: ClassVar[float] = 2e-4
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"recompute", "chunked_loss"})

    rank: int = Field(64, ge=1, le=8192, description="Of the space (r); matrices of a smaller side have plain AdamW.")
    gap: int = Field(200, ge=1, le=100_000, description="Updates between two projections (T).")
    scale: float = Field(0.25, gt=0, le=4096, description="Of a step back in the whole space (α).")

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return Adam in a low-rank space."""
        from stages.technique.projected import Projected

        return Projected(
            model, train, kind="galore", rank=self.rank, gap=self.gap, scale=self.scale, tensor_wise=False, seed=seed
        )
