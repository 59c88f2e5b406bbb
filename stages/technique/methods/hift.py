"""HiFT: groups of layers take turns, one a step, every group with Adam's moments of its own in main memory.

Every parameter trains, embeddings and head too. A device holds the gradients and moments of one group; main memory
holds the other moments (8 bytes a parameter), so on a CPU gradients and activations alone are saved. The learning rate
changes once a cycle.
Source: Liu et al. 2024 (arXiv 2401.15207), algorithm 1 and section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from data_contracts.config import Saving
from stages.technique.base import InPlace

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from data_contracts.config import TrainConfig
    from stages.technique.optimizer import Optimizer
    from stages.technique.step import States


class Hift(InPlace):
    """Train the model group by group, one group a step."""

    learning_rate: ClassVar[float] = 1e-5
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"recompute", "chunked_loss"})

    layers: int = Field(1, ge=1, le=1000, description="Neighbouring decoder layers of a group (m).")
    order: Literal["ascending", "descending"] = Field("ascending", description="From the bottom up or the top down.")

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model itself; which group trains is the optimizer's to say."""
        return model.requires_grad_(False)

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return Adam on one group at a time, the other moments parked."""
        from stages.technique.blocks import Schedule, all_blocks
        from stages.technique.parked import ParkedBlocks

        groups = all_blocks(model, self.layers)
        return ParkedBlocks(model, groups, Schedule(len(groups), 1, self.order, seed), train, learning_rate)

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return the number of parameters of the largest group."""
        from stages.technique.blocks import all_blocks, size_of

        return max(size_of(group) for group in all_blocks(model, self.layers))

    @property
    def traced_layers(self) -> int:
        """The lowest group and a layer above it."""
        return self.layers + 1

    @property
    def priced_layers(self) -> tuple[int, int]:
        """One whole group, and two."""
        return (self.layers, 2 * self.layers)
