"""PEQA: a model of n-bit numbers of which the scales alone train.

W = s (q - z): the whole numbers and zero points stay, a scale an output (or a group of inputs) is learnt. Gradients and
moments are of the scales, one number a row of each matrix, and another task is another set of scales for the same
numbers. The backward pass forms a matrix's whole gradient for a moment, to read the scales' off it.
Source: Kim et al. 2023 (arXiv 2305.14152), equations 1 and 2; its numbers come from optimal brain quantisation or from
rounding to the nearest, as here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.technique.base import BesideNumbers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class Peqa(BesideNumbers):
    """Train the scales of n-bit layers.

    The default learning rate is chosen small beside a scale, which is a weight's size over the numbers it has: about
    what the paper tunes for models from 1 to 65 billion parameters.
    """

    learning_rate: ClassVar[float] = 1e-5

    bits: int = Field(4, ge=2, le=8, description="Of a weight.")
    group_size: int | None = Field(
        None, ge=2, le=65536, description="Inputs that share a scale; unset is all of an output's."
    )

    def held(self, layer: nn.Linear) -> nn.Module:
        """Return the layer with scales that train."""
        from stages.technique.held import TrainedScales

        return TrainedScales(layer, self.bits, self.group_size)

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return the number of scales of the decoder's linear layers, and the embedding's numbers."""
        return self.embedded(model) + sum(
            -(-inputs // min(self.group_size or inputs, inputs)) * outputs for inputs, outputs in self.shapes(model)
        )
