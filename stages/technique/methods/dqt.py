"""DQT: every weight trains, and those of the decoder's linear layers are never held in more than n bits.

The n-bit numbers are updated directly: a matrix is made whole, moved by AdamW and rounded stochastically to n bits, so
no second copy of the weights is kept. Gradients and moments are those of full fine-tuning; updates inside the
backward pass and moments of fewer bits shrink them too. Scales follow the largest magnitude of each group. Activations
stay as they are (the paper's 8 bits are not taken), and a start from few bits is a start from a rounded model: eight
bits leave a trained one almost as it is, three or four do not.
Source: Zhao et al. 2024 (arXiv 2412.04787), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.technique.base import InNumbers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from data_contracts.config import TrainConfig
    from stages.technique.optimizer import Optimizer
    from stages.technique.step import States


class Dqt(InNumbers):
    """Train n-bit weights by stochastic rounding. The default peak learning rate is that of `full`."""

    learning_rate: ClassVar[float] = 2e-5

    bits: int = Field(8, ge=2, le=8, description="Of a weight.")
    group_size: int | None = Field(
        64, ge=2, le=65536, description="Inputs that share a scale; null is all of an output's."
    )

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model with its decoder's linear layers in n bits; everything trains."""
        from stages.model.packed import hold
        from stages.technique.blocks import layers_of
        from stages.technique.grid import GridLinear

        for _, layer in layers_of(model):
            hold(layer, lambda child: GridLinear(child, self.bits, self.group_size))
        return super().wrap(model)

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return AdamW whose updates are rounded."""
        from stages.technique.grid import GridAdam

        return GridAdam(model, train, learning_rate, states, seed)
