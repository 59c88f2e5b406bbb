"""SubZero: zeroth-order training along directions inside a random low-rank subspace of each matrix.

As MeZO, but a matrix moves along U Z Vᵀ, with orthonormal U and V that stay for some steps and a small Gaussian Z that
is new each step: the slope is read along r² numbers a matrix, not m n. U and V are drawn again from a seed, so the
memory is MeZO's. Near-square reshaping, which the paper has for thin matrices of adapters, has nothing to do here.
Source: Yu et al. 2024 (arXiv 2410.08989), algorithms 1 to 3. Its U Z Vᵀ is scaled by √(m n) / r, so that z has unit
variance and ε is that of MeZO.
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


class Subzero(Probing):
    """Train every parameter by the slope of the loss along directions of random subspaces."""

    learning_rate: ClassVar[float] = 1e-6
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"chunked_loss"})

    epsilon: float = Field(1e-3, gt=0, le=1, description="How far weights are moved to read the slope.")
    rank: int = Field(8, ge=1, le=256, description="Of a matrix's subspace (r).")
    interval: int = Field(1000, ge=1, le=100_000, description="Steps that a subspace is kept (T0).")

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return descent along directions of subspaces."""
        from stages.technique.gaussian import Subspace

        return Subspace(model, train, self.epsilon, seed, rank=self.rank, interval=self.interval)
