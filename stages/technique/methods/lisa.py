"""LISA: embeddings, last norm and head train always, and a few layers that are drawn anew every so many steps.

Gradients and moments take the memory of the drawn layers and of what lies outside the layers. Moments of layers that
are no longer drawn are dropped: kept, they would grow to those of full training.
Source: Pan et al. 2024 (arXiv 2403.17919), algorithm 1; two layers and 20 steps are section 4's.
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


class Lisa(InPlace):
    """Train what lies outside the layers and a few layers at a time."""

    learning_rate: ClassVar[float] = 1e-5
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"recompute", "chunked_loss"})

    layers: int = Field(2, ge=1, le=1000, description="Decoder layers that train at a time.")
    block_steps: int = Field(20, ge=1, le=100_000, description="Optimizer steps between two draws of them (K).")

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model itself; which layers train is the optimizer's to say. Raises `ConfigError` for too few."""
        from stages.technique.blocks import layers_of

        if (layers := len(layers_of(model))) < self.layers:
            raise ConfigError(
                "lisa draws its layers among the model's",
                f"{self.layers} are to train at a time and the model has {layers}",
                "lower `layers`",
            )
        return model.requires_grad_(False)

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return Adam on drawn layers and on what lies outside them."""
        from stages.technique.drawn_layers import DrawnLayers

        return DrawnLayers(model, train, learning_rate, count=self.layers, stay=self.block_steps, seed=seed)

    @property
    def traced_layers(self) -> int:
        """The drawn layers and two that wait."""
        return self.layers + 2

    @property
    def priced_layers(self) -> tuple[int, int]:
        """The drawn layers, and one that waits."""
        return (self.layers, self.layers + 1)

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return the number of parameters outside the layers and of the drawn ones."""
        from stages.technique.blocks import layer_blocks, outer_blocks, size_of

        blocks = sorted((size_of(block) for block in layer_blocks(model)), reverse=True)
        return sum(map(size_of, outer_blocks(model))) + sum(blocks[: self.layers])
