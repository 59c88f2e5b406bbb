"""QA-LoRA: adapters that go into the zero points of a base of n-bit numbers, so that merging keeps it one.

The linear layers of the decoder are whole numbers of 4 bits with a scale and a zero point a group of 32 inputs. An
adapter sees the sum of each group, so its product is one number an output and group and is taken in by the zero point:
what is deployed is what was trained, in n bits. QLoRA's merged model is of whole weights again. Numbers are rounded to
the nearest here, where the paper lets GPTQ choose them on calibration data.
Source: Xu et al. 2023 (arXiv 2309.14717), section 3.3 and algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.technique.base import BesideNumbers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class QaLora(BesideNumbers):
    """Train adapters over groups of inputs beside n-bit layers.

    The default rank, alpha and learning rate are those of QLoRA, whose settings the paper takes over.
    """

    learning_rate: ClassVar[float] = 2e-4

    bits: int = Field(4, ge=2, le=8, description="Of a weight.")
    group_size: int = Field(32, ge=2, le=65536, description="Inputs that share a scale and a zero point.")
    r: int = Field(64, ge=1, le=4096, description="Rank of an adapter. Xu et al. 2023.")
    alpha: float = Field(16.0, gt=0, le=65536, description="The update is scaled by alpha / r.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of an adapter's inputs dropped in training.")

    def held(self, layer: nn.Linear) -> nn.Module:
        """Return the layer beside an adapter over groups of its inputs, which alone trains."""
        from stages.technique.held import GroupAdapter

        scaling = self.alpha / self.r
        return GroupAdapter(layer, self.bits, self.group_size, rank=self.r, scaling=scaling, dropout=self.dropout)

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return the sum over the decoder's linear layers of r (groups + outputs), and the embedding's numbers."""
        return self.embedded(model) + sum(
            self.r * (-(-inputs // min(self.group_size, inputs)) + outputs) for inputs, outputs in self.shapes(model)
        )
