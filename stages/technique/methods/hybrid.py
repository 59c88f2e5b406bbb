"""Hybrid: one layer trains by Adam, the others wait in few bits, and a zeroth-order term regularises.

Three savings at once, where each alone moves the bottleneck: packed waiting layers bound the weights (8.5 or 4.5 bits
each), block-wise training bounds gradients and moments (12 bytes a parameter of one layer), and rows longer than
`long_tokens` are read by forward passes alone, which bounds the activations. The zeroth-order term is a small plain
step along random directions by their slope: in the mean that of a smoothed loss, and a regulariser.
Sources: Luo, Yu & Li 2024 (BAdam); Li et al. 2024 (Addax, arXiv 2410.06441), section 3, for the term and the split by
length; Zhao et al. 2024 (arXiv 2412.04787) for stochastic rounding. Their union is what the survey of Schmidt et al.
2026 (arXiv 2606.10706) proposes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from data_contracts.config import Saving
from stages.technique.base import Order, ProbingLongRows

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from data_contracts.config import TrainConfig
    from stages.technique.optimizer import Optimizer
    from stages.technique.step import States


class Hybrid(ProbingLongRows):
    """Train packed layers one at a time, with a zeroth-order term."""

    learning_rate: ClassVar[float] = 1e-5
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"recompute", "chunked_loss"})
    packs: ClassVar[bool] = True

    bits: Literal[4, 8] | None = Field(8, description="Of a waiting layer's weights; unset (null) holds them whole.")
    block_steps: int = Field(50, ge=1, le=100_000, description="Optimizer steps that a layer trains at a time (K).")
    order: Order = Field("random", description="Of the layers in a cycle; random draws a new one each time.")
    share: float = Field(1e-3, ge=0, le=1, description="The zeroth-order step's rate over Adam's (α).")
    epsilon: float = Field(1e-3, gt=0, le=1, description="How far weights are moved to read the slope.")

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model with its layers packed and everything frozen."""
        from stages.technique.packed_blocks import pack_layers

        model.requires_grad_(False)
        pack_layers(model, self.bits)
        return model

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return Adam on the layer that stands whole."""
        from stages.technique.blocks import Schedule, layers_of
        from stages.technique.packed_blocks import PackedBlocks

        schedule = Schedule(len(layers_of(model)), self.block_steps, self.order, seed)
        return PackedBlocks(
            model, schedule, train, learning_rate, bits=self.bits, share=self.share, epsilon=self.epsilon,
            long_tokens=self.long_tokens,
        )  # fmt: skip

    def merge(self, model: nn.Module) -> PreTrainedModel:
        """Return the model with every layer whole, as it was held."""
        from stages.model.packed import release_packed

        release_packed(model)
        return model  # type: ignore[return-value]

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return the number of parameters of the largest layer."""
        from stages.technique.blocks import layer_blocks, size_of

        return max(size_of(block) for block in layer_blocks(model))
