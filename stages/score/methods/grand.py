"""GraNd: the norm of an example's gradient, exact over the trainable linear layers of the decoder.

Large norms are examples the model would move most for, and mislabelled ones among them. The gradient is that of the
mean answer-token loss, or of the sum, which grows with length. One training pass over the pool; no example's gradient
is held whole (`stages/gradients/norms.py`). Source: Paul, Ganguli & Dziugaite 2021 ("Deep Learning on a Data Diet");
theirs is a mean over models early in training, this one is of the one checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from stages.score.scorer import Block, Given, Scorer

if TYPE_CHECKING:
    from stages.gradients.norms import GradientNorms


class GraNd(Scorer):
    """‖gradient of the example's answer loss‖₂ over linear layers; negated for `easy`."""

    reads = frozenset({"tokens", "model"})
    passes = "train"

    per: Literal["token", "visit"] = Field("token", description="Of the mean loss of an answer token, or of their sum.")
    order: Literal["hard", "easy"] = Field("hard", description="Which examples are best: large norms, or small ones.")

    def prepare(self, given: Given) -> GradientNorms:
        """Open the taps. Raises `ModelError` where no linear layer trains."""
        from stages.gradients.norms import GradientNorms

        assert given.trained is not None
        return given.resources.enter_context(GradientNorms(given.trained.model, autocast=given.autocast))

    def suspicion(self, score_N: np.ndarray) -> np.ndarray:
        """Return the norms: a wrong answer moves the model most."""
        return -score_N if self.order == "easy" else score_N

    def score(self, block: Block, state: GradientNorms) -> np.ndarray:
        """Return score_B; NaN where nothing is predicted."""
        norm_D, loss_sum_D, answer_tokens_D = state.of(block.tokens)
        block.note_losses(loss_sum_D, answer_tokens_D)
        score_D = norm_D.masked_fill(answer_tokens_D == 0, float("nan"))
        if self.per == "token":
            score_D = score_D / answer_tokens_D
        return np.asarray((-score_D if self.order == "easy" else score_D).cpu())
