"""LOZO: zeroth-order training along low-rank directions, one of the two factors kept for some steps.

As MeZO, but a matrix moves along U Vᵀ of rank r: gradients of large models are nearly of low rank, so the slope along
such a direction tells more. With `momentum` (LOZO-M) a running mean of the thin factor is kept: r numbers a row.
Source: Chen et al. 2024 (arXiv 2410.07698), algorithms 1 and 2. The paper's U Vᵀ / r is g·z here: either carries 1/√r,
and ε is that of a direction of unit variance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from data_contracts.config import Saving
from stages.technique.base import Probing

if TYPE_CHECKING:
    from torch import nn

    from data_contracts.config import TrainConfig
    from stages.technique.optimizer import Optimizer
    from stages.technique.step import States


class Lozo(Probing):
    """Train every parameter by the slope of the loss along low-rank random directions."""

    learning_rate: ClassVar[float] = 1e-6
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"chunked_loss"})

    epsilon: float = Field(1e-3, gt=0, le=1, description="How far weights are moved to read the slope.")
    rank: int = Field(2, ge=1, le=256, description="Of a matrix's direction (r).")
    interval: int = Field(50, ge=1, le=100_000, description="Steps that the right factor is kept (ν).")
    momentum: float = Field(0.0, ge=0, lt=1, description="Of the left factor (LOZO-M); 0 keeps nothing.")

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return descent along low-rank directions."""
        from stages.technique.gaussian import LowRank

        return LowRank(model, train, self.epsilon, seed, rank=self.rank, interval=self.interval, momentum=self.momentum)
