"""GREATS: rows whose joint step takes most off the target's loss; likeness to rows already taken counts against one.

A step −η D ḡ along the mean ḡ of k rows' gradients changes the target's loss by −η⟨Ḡ, D ḡ⟩ + η²/2 ⟨D ḡ, H D ḡ⟩.
Adam's D⁻¹ = √v̂ + ε stands for the curvature's shape and ρ/η for its size (a tuned rate is about one over it):
H = ρ/η D⁻¹. So η falls out, and the gain over η, times k, is

    Σ_{j∈S} ⟨gⱼ, D Ḡ⟩ − ρ/2k Σ_{i,j∈S} ⟨gᵢ, D gⱼ⟩,

maximised greedily. With ρ = 1 it is largest where ḡ is nearest to Ḡ in Adam's own metric. The published code has raw
gradients, η in one term and η² in the other: at usual rates the second is nothing, and at a warm-up's rate of 0 all
rows are equal. Ḡ is the mean over all of the target, not over two rows drawn anew. ⟨gⱼ, D Ḡ⟩ is exact; pairs are
compared by a sparse sketch of √D g, so that no gradient is kept. Counted are the decoder's linear layers.
Source: Wang et al. 2024 (GREATS, NeurIPS), section 4, and the corrections of this docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from stages.coreset.greedy import kept_greedy
from stages.coreset.objectives import Alignment
from stages.technique.batch_selector import BatchSelector, Picked

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stages.technique.looking import Given

PARTS = 2
"""Non-zeros a coordinate of the sketch."""


class Greats(BatchSelector):
    """Rows for the target, each given those before it."""

    reads_target: ClassVar[bool] = True

    curvature: float = Field(
        1.0, ge=0, le=100, description="ρ: what likeness to other chosen rows costs; 0 takes the best rows one by one."
    )
    dimensions: int = Field(
        4096, ge=2, multiple_of=PARTS, description="Numbers of a row's sketch, by which rows are compared."
    )
    every: int = Field(8, ge=1, description="Optimizer steps between passes over the target.")
    seed: int = Field(0, ge=0, description="Of the sketch.")

    @property
    def direction_steps(self) -> int:
        """Optimizer steps that a direction is kept."""
        return self.every

    def read(self, model: nn.Module) -> list[str]:
        """Return the decoder's linear layers that train."""
        from stages.gradients.passes import decoder_linears

        return sorted({name for own in decoder_linears(model).values() for name in own.values()})

    def numbers(self, sizes: Mapping[str, int]) -> int:
        """Return one for the product with the direction, and the sketch."""
        return 1 + self.dimensions

    def row_flops(self, sizes: Mapping[str, int]) -> int:
        """Return the product's, the division by √(√v̂ + ε), and the sketch's."""
        return (2 + 1 + 2 * PARTS) * sum(sizes.values())

    def note(self, number_dK: Tensor, name: str, gradient_dP: Tensor, given: Given) -> None:
        """Add ⟨g, D Ḡ⟩ and the sketch of √D g."""
        from stages.gradients.sketch import SparseSketch

        number_dK[:, 0] += gradient_dP @ given.direction[name].flatten().to(gradient_dP)
        gradient_dP.div_(given.root(name).sqrt())
        SparseSketch(self.dimensions, parts=PARTS, seed=self.seed).add(number_dK[:, 1:], name, gradient_dP)

    def choose(self, number_nK: np.ndarray, source_n: np.ndarray, share_n: np.ndarray, count: int) -> Picked:
        """Return the greedy choice; where the objective no longer rises it goes on, so that windows are full."""
        sketch_nK = number_nK[:, 1:].astype(np.float64)
        worth_n = number_nK[:, 0].astype(np.float64)
        objective = Alignment(worth_n, sketch_nK @ sketch_nK.T, self.curvature / count)
        rows, gains = kept_greedy(objective, count)
        order = np.argsort(rows)
        return Picked(rows[order], np.ones(len(rows)), gains[order])
