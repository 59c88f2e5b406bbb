"""LoPT: the decoder in contiguous blocks, each passed forward and backward before the next begins.

Between blocks nothing is propagated back. The last one has the model's own loss; each before it learns to keep what it
was given: a small head rebuilds its detached input from its output, and the mean square of what is missed is its loss.
So activations are those of one block at a time. The heads exist in training alone: a checkpoint is the plain model, and
they lie beside it for the next segment. A tied embedding belongs to the first block and to the last and adds up both
gradients, where the reference unties it. Adam moves a weight by the rate however little its loss asks for, so what the
blocks' own losses alone reach has a share of the rate (the reference's `lr_k1`), which no weight λ would give it.
Source: the LoPT reference (arXiv 2605.04913: two blocks, λ 10, rate 2e-5 for all), which passes backward once at the
end and so saves no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from data_contracts.config import Saving
from data_contracts.errors import ConfigError
from stages.technique.base import InPlace

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from data_contracts.config import TrainConfig
    from stages.technique.optimizer import Optimizer
    from stages.technique.step import States


class Lopt(InPlace):
    """Train every parameter, block by block within each step."""

    learning_rate: ClassVar[float] = 2e-5
    steady: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"chunked_loss", "states_8bit", "states_4bit", "states_mini"})

    blocks: int = Field(2, ge=2, le=1000, description="Contiguous parts of the decoder's layers, as equal as can be.")
    weight: float = Field(10.0, ge=0, description="λ: what the blocks' own losses, in the mean, count beside the loss.")
    local_rate: float = Field(0.03, gt=0, le=1, description="Share of the rate that all blocks but the last move at.")

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model with a head for each block but the last. Raises `ConfigError` for too few layers."""
        from stages.technique.blocks import layers_of
        from stages.technique.local_blocks import add_heads

        if (layers := len(layers_of(model))) < self.blocks:
            raise ConfigError(
                "lopt has at least one layer a block",
                f"{self.blocks} blocks were asked for and the model has {layers} layers",
                "lower `blocks`",
            )
        add_heads(model, self.blocks)
        return model.requires_grad_(True)

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return AdamW over the model and the heads."""
        from stages.technique.local_blocks import LocalAdam

        return LocalAdam(model, train, learning_rate, states, weight=self.weight, share=self.local_rate)

    def merge(self, model: nn.Module) -> PreTrainedModel:
        """Return the model without heads."""
        from stages.technique.local_blocks import drop_heads

        drop_heads(model)
        return model  # type: ignore[return-value]

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return the number of parameters, the heads' among them."""
        from stages.technique.local_blocks import head_size

        return super().trainable_count(model) + (self.blocks - 1) * head_size(model.config.hidden_size)
