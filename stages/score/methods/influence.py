"""Influence: how far one training step on an example lowers the target's loss, for the price of training on it once.

The score of example i for target group j is ⟨gᵢ, D Ḡⱼ⟩: gᵢ the gradient of what one visit of the example adds to a
step's loss, Ḡⱼ the mean over the group of each example's mean answer-token gradient, D = 1/(√v̂ + ε) from the
checkpoint's Adam moments. Nothing is projected or stored: D Ḡⱼ is fixed, and each example's product with it is read in
one batched forward and backward pass. Source: Xia et al. 2024 (LESS), the preconditioner moved to the target, where it
is exact. LESS divides gᵢ by its tokens and norm; training here weighs each answer token alike, so a visit adds the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from data_contracts.errors import InputError
from stages.score.scorer import Block, Given, Scorer

if TYPE_CHECKING:
    from stages.gradients.inner_product import InnerProducts


class Influence(Scorer):
    """⟨gradient of the example, preconditioned mean gradient of the target⟩; positive lowers the target's loss."""

    reads = frozenset({"tokens", "model", "moments"})
    passes = "train"
    grouped = True

    per: Literal["visit", "token"] = Field(
        "visit",
        description="What the score is worth: one visit of the example (for quotas of rows), or each of its answer "
        "tokens (for quotas of tokens; short answers rank higher).",
    )

    def prepare(self, given: Given) -> InnerProducts:
        """Compute each group's preconditioned mean gradient and open the taps.

        Raises `InputError` where there is no target, or a target row has no token to predict.
        """
        import torch

        from stages.gradients.inner_product import InnerProducts
        from stages.gradients.precondition import mean_gradient

        trained = given.trained
        assert trained is not None
        if given.target is None or not len(given.target):
            raise InputError("a target with at least one row", "it has none", "name files under `data.target`")
        directions: dict[str, Any] = {}
        for column, rows in enumerate(given.members):
            gradient, _, _ = mean_gradient(trained.model, _batches(given, rows), autocast=given.autocast)
            for name, value in _preconditioned(gradient, given).items():
                if name not in directions:
                    directions[name] = torch.zeros(
                        (len(given.members), *value.shape), dtype=value.dtype, device=value.device
                    )
                directions[name][column] = value
        trained.moments.clear()  # as large as two models; no longer needed
        products = InnerProducts(trained.model, directions, autocast=given.autocast)
        return given.resources.enter_context(products)

    def score(self, block: Block, state: InnerProducts) -> np.ndarray:
        """Return score_BJ; NaN where nothing is predicted."""
        import torch

        before = state.extra_flops
        found = state.of(block.tokens)
        block.meter.add(state.extra_flops - before)
        block.note_losses(found.loss_sum_D, found.answer_tokens_D)
        tokens_D1 = found.answer_tokens_D[:, None].double()
        unit_D1 = tokens_D1 if self.per == "token" else torch.ones_like(tokens_D1)
        score_DJ = found.product_DJ / unit_D1.masked_fill(tokens_D1 == 0, float("nan"))
        return np.asarray(score_DJ.float().cpu())


def _preconditioned(gradient: dict[str, Any], given: Given) -> dict[str, Any]:
    from stages.gradients.precondition import precondition

    trained = given.trained
    assert trained is not None
    updates = int(trained.trainer.get("updates", 0))
    if not trained.moments or updates < 1:
        given.notice(
            "influence: there is no checkpoint with Adam moments, so gradients are compared as they are (D = 1); "
            "a warm-up gives moments and usually a better ranking"
        )
        return gradient
    return precondition(
        gradient,
        trained.moments,
        updates,
        beta2=float(trained.trainer["beta2"]),
        epsilon=float(trained.trainer["epsilon"]),
    )


def _batches(given: Given, rows: np.ndarray) -> Any:
    """Yield the group's rows as batches on the device, counting each as one training pass."""
    from stages.model.batch import collate, length_buckets

    assert given.target is not None
    for bucket in length_buckets([int(given.target.lengths[row]) for row in rows], given.batch_tokens):
        batch = collate([given.target.row(int(rows[item])) for item in bucket]).to(given.device)
        given.meter.train(batch)
        yield batch
