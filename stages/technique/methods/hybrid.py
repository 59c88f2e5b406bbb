"""Hybrid: one layer trains by Adam, the others wait in few bits, and the embeddings move by forward passes alone.

Three savings at once, where each alone moves the bottleneck: packed waiting layers bound the weights (8.5 or 4.5 bits
each), block-wise training bounds gradients and moments (12 bytes a parameter of one layer), and rows longer than
`long_tokens` are read by forward passes alone, which bounds the activations. What lies outside the layers moves by a
plain step along random directions by their slope, for which nothing is kept: block-wise training leaves it out, since
an embedding's gradients and moments may be those of several layers.
Sources: Luo, Yu & Li 2024 (BAdam); Li et al. 2024 (Addax, arXiv 2410.06441), section 3, for the slope beside gradients
and the split by length; Malladi et al. 2023 (MeZO, arXiv 2305.17333); Zhao et al. 2024 (arXiv 2412.04787) for
stochastic rounding. Their union is what the survey of Schmidt et al. 2026 (arXiv 2606.10706) proposes.
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
    """Train packed layers one at a time, and what lies outside them along slopes.

    The slope's rate is Adam's own by default: MeZO's 10⁻⁶ was found for 13 billion numbers, and as their number grows
    the best falls (Malladi et al., section 4), so that of an embedding and a head of a billion is about 10⁻⁵. Of 1, 3
    and 10 times Adam's, 3 was best for the small model of `benchmarks.convergence`.
    """

    learning_rate: ClassVar[float] = 1e-5
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"recompute", "chunked_loss"})
    packs: ClassVar[bool] = True

    bits: Literal[4, 8] | None = Field(8, description="Of a waiting layer's weights; unset (null) holds them whole.")
    block_steps: int = Field(50, ge=1, le=100_000, description="Optimizer steps that a layer trains at a time (K).")
    order: Order = Field("random", description="Of the layers in a cycle; random draws a new one each time.")
    embeddings: bool = Field(False, description="Let the embedding take a turn too; it waits whole.")
    share: float = Field(1.0, ge=0, le=1000, description="The zeroth-order step's rate over Adam's (α).")
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
        from stages.technique.blocks import Schedule
        from stages.technique.packed_blocks import PackedBlocks, parts_of

        parts = parts_of(model, self.embeddings)
        schedule = Schedule(len(parts), self.block_steps, self.order, seed)
        return PackedBlocks(
            model, parts, schedule, train, learning_rate, bits=self.bits, share=self.share, epsilon=self.epsilon,
            long_tokens=self.long_tokens,
        )  # fmt: skip

    def merge(self, model: nn.Module) -> PreTrainedModel:
        """Return the model with every layer whole, as it was held."""
        from stages.model.packed import release_packed

        release_packed(model)
        return model  # type: ignore[return-value]

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return the number of parameters of the largest of what takes turns."""
        from stages.technique.packed_blocks import parts_of, size_of_part

        return max(size_of_part(part) for _, part in parts_of(model, self.embeddings))
