"""BAdam: all layers train, one at a time, each by Adam for some steps; then its moments are dropped.

Gradients and moments take the memory of one layer: 4 bytes a parameter of the model and 12 bytes a parameter of a layer
in float32. The backward pass ends at the layer that trains. Embeddings, the last norm and the head stay as they are, as
in the paper, unless asked for: text unlike what the model has read asks most of them (`benchmarks.convergence`).
Source: Luo, Yu & Li 2024 (arXiv 2404.02827), algorithm 1 and section 2.2; their code's `include_embedding` and
`include_lm_head` are `embeddings` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from data_contracts.config import Saving
from stages.technique.base import InPlace, Order

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from data_contracts.config import TrainConfig
    from stages.technique.blocks import Block
    from stages.technique.optimizer import Optimizer
    from stages.technique.step import States


class Badam(InPlace):
    """Train the decoder's layers block by block, or the whole model.

    The default peak learning rate, 1e-5, and 50 steps a block are those of the paper's section 3.1 up to 8B; smaller
    models bear more.
    """

    learning_rate: ClassVar[float] = 1e-5
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset(
        {"recompute", "chunked_loss", "states_8bit", "states_4bit", "states_mini"}
    )

    block_steps: int = Field(50, ge=1, le=100_000, description="Optimizer steps that a layer trains at a time (K).")
    order: Order = Field("random", description="Of the layers in a cycle; random draws a new one each time.")
    embeddings: bool = Field(
        False, description="Let the embeddings take a turn too, and the last norm with a head that has its own weight."
    )

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model itself; which layer trains is the optimizer's to say."""
        return model.requires_grad_(False)

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return Adam on one layer at a time."""
        from stages.technique.blocks import BlockAdam, Schedule

        blocks = self._blocks(model)
        return BlockAdam(
            model, blocks, Schedule(len(blocks), self.block_steps, self.order, seed), train, learning_rate, states
        )

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return the number of parameters of the largest block."""
        from stages.technique.blocks import size_of

        return max(size_of(block) for block in self._blocks(model))

    def _blocks(self, model: nn.Module) -> list[Block]:
        from stages.technique.blocks import all_blocks, layer_blocks

        return all_blocks(model) if self.embeddings else layer_blocks(model)
