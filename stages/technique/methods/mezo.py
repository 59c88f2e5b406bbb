"""MeZO: all weights train by two forward passes a step, in the memory of inference.

Nothing but a seed and a number is kept: no gradients, no moments, no activations. Steps are many and small; a model
that already does the task in a few words learns most. Weights move along a Gaussian direction of all parameters.
Source: Malladi et al. 2023 (arXiv 2305.17333), algorithm 1; ε and rate from its table 15.
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


class Mezo(Probing):
    """Train every parameter by the slope of the loss along a random direction."""

    learning_rate: ClassVar[float] = 1e-6
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"chunked_loss"})

    epsilon: float = Field(1e-3, gt=0, le=1, description="How far weights are moved to read the slope.")

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return descent along Gaussian directions."""
        from stages.technique.gaussian import Gaussian

        return Gaussian(model, train, self.epsilon, seed)
