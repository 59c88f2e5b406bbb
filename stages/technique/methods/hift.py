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
    from stages.technique.blocks import Block
    from stages.technique.optimizer import Optimizer
    from stages.technique.step import States


class Hift(InPlace):
    """Train the model group by group, one group a step."""

    learning_rate: ClassVar[float] = 1e-5
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"recompute", "chunked_loss"})

    order: Literal["ascending", "descending"] = Field("ascending", description="From the bottom up or the top down.")

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model itself; which group trains is the optimizer's to say."""
        return model.requires_grad_(False)

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return Adam on one group at a time, the other moments parked."""
        from stages.technique.blocks import Schedule
        from stages.technique.parked import ParkedBlocks

        groups = self._groups(model)
        return ParkedBlocks(model, groups, Schedule(len(groups), 1, self.order, seed), train, learning_rate)

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return the number of parameters of the largest group."""
        from stages.technique.blocks import size_of

        return max(size_of(group) for group in self._groups(model))

    def _groups(self, model: nn.Module) -> list[Block]:
        from stages.technique.blocks import layer_blocks, outer_blocks

        below, above = outer_blocks(model)
        return [group for group in (below, *layer_blocks(model), above) if group]
