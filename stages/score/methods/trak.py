"""TRAK: influence through a linear model of the network, which takes away what the pool's gradients share.

The margin f = log(p / (1 − p)) with p = exp(−mean answer-token loss) is linear in the weights near where they are, with
features φ = ∇f in a random projection. The logistic regression on these features has the influence of example i on a
target row z: φ(z)ᵀ (ΦᵀΦ + λI)⁻¹ φᵢ (1 − pᵢ), Φ the pool's features. A group's score is the mean over its rows. The
pool is passed once for the features, which are stored, and the stored ones twice, a part at a time; K x K numbers are
held. Source: Park et al. 2023 (TRAK), equation 15, one model; the projection is a sparse sketch of the same variance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from stages.gradients.quantised import Quantiser
from stages.meter.linear_algebra import solve_flops
from stages.score.features import FeatureScorer
from stages.score.scorer import Block, Given, Meter
from stages.score.target import target_mean

if TYPE_CHECKING:
    from torch import Tensor

    from stages.gradients.examples import ExampleGradients
    from stages.gradients.sketch import SparseSketch
    from stages.model.batch import TokenBatch


class Trak(FeatureScorer):
    """How much the example raises the target's margin in the linearised model; positive helps the target."""

    reads = frozenset({"tokens", "model"})
    passes = "train"
    grouped = True
    second_pass = True

    dimensions: int = Field(2048, ge=2, le=2**15, multiple_of=2, description="K of the projection.")
    regularisation: float = Field(
        0.01, gt=0, le=1e6, description="λ, as a multiple of the mean of ΦᵀΦ's diagonal. TRAK's own default is 0."
    )

    def prepare(self, given: Given) -> Prepared:
        """Open the model and compute each group's mean feature. Raises `InputError` where there is no target."""
        from stages.gradients.examples import ExampleGradients
        from stages.gradients.sketch import SparseSketch

        assert given.trained is not None
        given.trained.moments.clear()
        gradients = given.resources.enter_context(ExampleGradients(given.trained.model, autocast=given.autocast))
        sketch = SparseSketch(self.dimensions, seed=given.seed)

        def features(batch: TokenBatch) -> np.ndarray:
            given.meter.train(batch)
            given.meter.add(sketch.flops(gradients.size) * len(batch.example_ids))
            return margins(gradients, sketch, batch)[0]

        return Prepared(gradients, sketch, given.meter, target_mean(given, features))

    def score(self, block: Block, state: Prepared) -> np.ndarray:
        """Leave φ with the block and return 1 − p, shape (B, 1); NaN where nothing is predicted or p is 1."""
        feature_BK, doubt_B, loss_sum_B, answer_tokens_B = margins(state.gradients, state.sketch, block.tokens)
        block.meter.add(state.sketch.flops(state.gradients.size) * len(block.example_ids))
        block.note_losses(loss_sum_B, answer_tokens_B)
        block.note_features(Quantiser(self.dimensions, self.store_bits or 32), feature_BK)
        return doubt_B[:, None]

    def gather(self, features: Iterable[np.ndarray], state: Prepared) -> np.ndarray:
        """Return (ΦᵀΦ + λI)⁻¹ φ(target), shape (K, J)."""
        kernel_KK, rows = np.zeros((self.dimensions, self.dimensions)), 0
        for feature_BK in features:
            exact_BK = feature_BK.astype(np.float64)
            kernel_KK += exact_BK.T @ exact_BK
            rows += len(exact_BK)
        scale = float(np.trace(kernel_KK)) / self.dimensions
        kernel_KK[np.diag_indices(self.dimensions)] += self.regularisation * (scale or 1.0)
        groups = len(state.target_JK)
        products = 2 * rows * self.dimensions * (self.dimensions + groups)  # ΦᵀΦ, and the scores of `rescore`
        state.meter.add(products + solve_flops(self.dimensions, groups))
        return np.linalg.solve(kernel_KK, state.target_JK.T)

    def rescore(self, feature_BK: np.ndarray, first_BJ: np.ndarray, gathered: np.ndarray) -> np.ndarray:
        """Return score_BJ."""
        return (feature_BK.astype(np.float64) @ gathered) * first_BJ


@dataclass(frozen=True)
class Prepared:
    """The opened model, the projection, the meter and the groups' mean features."""

    gradients: ExampleGradients
    sketch: SparseSketch
    meter: Meter
    target_JK: np.ndarray


def margins(
    gradients: ExampleGradients, sketch: SparseSketch, batch: TokenBatch
) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """Return φ_DK, 1 − p_D (NaN where nothing is predicted or it is 0), loss_sum_D and answer_tokens_D."""
    import torch

    from stages.gradients.sketch import sketched

    found_DK, loss_sum_D, answer_tokens_D = sketched(gradients, sketch, batch, lambda _, __, value: value)
    doubt_D = -torch.expm1(-loss_sum_D / answer_tokens_D)  # exact where p is near 1
    feature_DK = -found_DK / (answer_tokens_D * doubt_D)[:, None]  # ∇f = −∇(mean loss) / (1 − p)
    unusable_D = ~torch.isfinite(feature_DK).all(dim=1)
    doubt_D, feature_DK = doubt_D.masked_fill(unusable_D, float("nan")), feature_DK.masked_fill(unusable_D[:, None], 0)
    return np.asarray(feature_DK.float().cpu()), np.asarray(doubt_D.float().cpu()), loss_sum_D, answer_tokens_D
