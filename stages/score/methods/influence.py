"""Influence: how far one training step on an example lowers the target's loss, for the price of training on it once.

The score of example i for target group j is ⟨gᵢ, D Ḡⱼ⟩: gᵢ the gradient of what one visit of the example adds to a
step's loss, Ḡⱼ the mean over the group of each example's mean answer-token gradient, D = 1/(√v̂ + ε) from the
checkpoint's Adam moments. Nothing is projected or stored: D Ḡⱼ is fixed, and each example's product with it is read in
one batched forward and backward pass. Source: Xia et al. 2024 (LESS), the preconditioner moved to the target, where it
is exact. LESS divides gᵢ by its tokens and norm; training here weighs each answer token alike, so a visit adds the sum.
With `store_bits` the same pass leaves each gᵢ, projected and not preconditioned, as an artifact: its product with
`Projection.project(D Ḡ, dual=True)` estimates the influence for any later target, at any checkpoint's moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from stages.gradients.quantised import Quantiser
from stages.score.features import FeatureScorer
from stages.score.scorer import Block, Given
from stages.score.target import target_directions

if TYPE_CHECKING:
    from stages.gradients.inner_product import InnerProducts
    from stages.gradients.projection import Projection


SEED = 0
"""Of the projections of stored features: fixed, so that any later run can compare with them."""


class Influence(FeatureScorer):
    """⟨gradient of the example, preconditioned mean gradient of the target⟩; positive lowers the target's loss."""

    reads = frozenset({"tokens", "model", "moments"})
    passes = "train"
    grouped = True

    per: Literal["visit", "token"] = Field(
        "visit",
        description="What the score is worth: one visit of the example (for quotas of rows), or each of its answer "
        "tokens (for quotas of tokens; short answers rank higher).",
    )

    per_layer: int = Field(
        16, ge=1, le=1024, description="With `store_bits`: numbers kept of each side of a linear layer's gradient."
    )

    def prepare(self, given: Given) -> tuple[InnerProducts, Projection | None]:
        """Compute each group's preconditioned mean gradient and open the taps.

        Raises `InputError` where there is no target, or a target row has no token to predict.
        """
        from stages.gradients.inner_product import InnerProducts
        from stages.gradients.projection import Projection

        assert given.trained is not None
        directions = target_directions(given)
        given.trained.moments.clear()
        model, projection = given.trained.model, None
        if self.keeps_features:
            projection = Projection(model, per_layer=(self.per_layer, self.per_layer), seed=SEED)
        products = InnerProducts(model, directions, autocast=given.autocast, beside=projection)
        return given.resources.enter_context(products), projection

    def score(self, block: Block, state: tuple[InnerProducts, Projection | None]) -> np.ndarray:
        """Return score_BJ; NaN where nothing is predicted."""
        import torch

        products, projection = state
        before = products.extra_flops
        found = products.of(block.tokens)
        block.meter.add(products.extra_flops - before)
        if projection is not None and self.store_bits:
            block.meter.add(projection.flops(*block.tokens.shape))
            feature_DK = np.asarray(projection.feature_DK.float().cpu())
            block.note_features(Quantiser(projection.dimensions, self.store_bits), feature_DK)
        block.note_losses(found.loss_sum_D, found.answer_tokens_D)
        tokens_D1 = found.answer_tokens_D[:, None].double()
        unit_D1 = tokens_D1 if self.per == "token" else torch.ones_like(tokens_D1)
        score_DJ = found.product_DJ / unit_D1.masked_fill(tokens_D1 == 0, float("nan"))
        return np.asarray(score_DJ.float().cpu())
