"""Addax: gradients of short rows and slopes of long ones, one step of plain descent; no moments.

Long rows make the activations of a backward pass dear, and forward passes keep none: the longest row that needs them
kept is `long_tokens`. Gradients of the short rows are held whole, 4 bytes a parameter, added up over a window; the
paper's own update inside the backward pass has one micro-batch a window and no clipping.
Source: Li et al. 2024 (arXiv 2410.06441), algorithm 1. Its α (10⁻⁴ to 10⁻² in the authors' runs) times the rate is a
zeroth-order step's rate: the defaults make it MeZO's 10⁻⁶. Plain descent at 10⁻² with gradients clipped to 1 is that of
Lv et al. 2023 (LOMO, arXiv 2306.09782).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from data_contracts.config import Saving
from stages.technique.base import ProbingLongRows

if TYPE_CHECKING:
    from torch import nn

    from data_contracts.config import TrainConfig
    from stages.technique.optimizer import Optimizer
    from stages.technique.step import States


class Addax(ProbingLongRows):
    """Train every parameter by the gradient of short rows and the slope of long ones."""

    learning_rate: ClassVar[float] = 1e-2
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"recompute", "chunked_loss"})

    share: float = Field(1e-4, ge=0, le=1, description="Weight of the zeroth-order part of a step (α).")
    epsilon: float = Field(1e-3, gt=0, le=1, description="How far weights are moved to read the slope.")

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return plain descent on both parts."""
        from stages.technique import mixed

        return mixed.Addax(
            model, train, share=self.share, epsilon=self.epsilon, seed=seed, long_tokens=self.long_tokens
        )
