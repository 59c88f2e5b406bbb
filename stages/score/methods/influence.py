"""Influence: how far one training step on an example lowers the target's loss, for the price of training on it once.

The score of example i for target group j is ⟨gᵢ, D Ḡⱼ⟩: gᵢ the gradient of what one visit of the example adds to a
step's loss, Ḡⱼ the mean over the group of each example's mean answer-token gradient, D = 1/(√v̂ + ε) from the
checkpoint's Adam moments. Nothing is projected or stored: D Ḡⱼ is fixed, and each example's product with it is read in
one batched forward and backward pass; or, for one group in float32, by the difference of two forward passes, where that
is seen to give the same number. Source: Xia et al. 2024 (LESS), the preconditioner moved to the target, where it
is exact. LESS divides gᵢ by its tokens and norm; training here weighs each answer token alike, so a visit adds the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from stages.score.scorer import Block, Given, Scorer
from stages.score.target import target_directions, worth

if TYPE_CHECKING:
    from torch import Tensor

    from stages.gradients.differences import Differences
    from stages.gradients.inner_product import InnerProducts

FORWARD_STEP, FORWARD_ERROR, FORWARD_ROWS = 1e-4, 0.01, 256
"""The forward form is taken where this step (‖εd‖ / ‖θ‖) is off by at most this share of the products of target rows;
a pool of fewer rows does not pay for finding out."""
CALIBRATION_ROWS = 16


class Influence(Scorer):
    """⟨gradient of the example, preconditioned mean gradient of the target⟩; positive lowers the target's loss."""

    reads = frozenset({"tokens", "model", "moments"})
    grouped = True

    per: Literal["visit", "token"] = Field(
        "visit",
        description="What the score is worth: one visit of the example (for quotas of rows), or each of its answer "
        "tokens (for quotas of tokens; short answers rank higher).",
    )
    form: Literal["auto", "backward"] = Field(
        "auto",
        description="Exact, by forward and backward passes; or by two forward passes where those are cheaper (one "
        f"target group, float32, at least {FORWARD_ROWS} rows) and off by at most {FORWARD_ERROR:.0%} on target rows.",
    )

    def prepare(self, given: Given) -> InnerProducts | Differences:
        """Compute each group's preconditioned mean gradient; open the taps, or choose the forward form.

        Raises `InputError` where there is no target, or a target row has no token to predict.
        """
        from stages.gradients.inner_product import InnerProducts

        assert given.trained is not None
        directions = target_directions(given)
        forward = self._forward(given, directions) if self.form == "auto" else None
        given.trained.moments.clear()
        given.facts["form"] = "backward" if forward is None else "forward"
        if forward is not None:
            return forward
        products = InnerProducts(given.trained.model, directions, autocast=given.autocast)
        return given.resources.enter_context(products)

    def _forward(self, given: Given, directions: dict[str, Tensor]) -> Differences | None:
        """Return the forward form where it is cheaper and seen to be right."""
        import torch

        from stages.gradients.differences import Differences
        from stages.score.step import calibrate

        assert given.trained is not None
        narrow = given.autocast is not None or any(torch.finfo(d.dtype).bits < 32 for d in directions.values())
        if narrow or len(given.groups) > 1 or given.pool_rows < FORWARD_ROWS:
            return None
        found = Differences(given.trained.model, directions, None, central=True)
        (error,) = calibrate(found, given, CALIBRATION_ROWS, (FORWARD_STEP,))
        given.facts["step_error"] = f"{error:.2g}"
        return found if error <= FORWARD_ERROR else None

    @classmethod
    def regime(cls, rows: int) -> str:
        """Return whether the forward form is thought of."""
        return "many" if rows >= FORWARD_ROWS else "few"

    def score(self, block: Block, state: InnerProducts | Differences) -> np.ndarray:
        """Return score_BJ; NaN where nothing is predicted."""
        from stages.gradients.inner_product import InnerProducts

        batch, meter = block.tokens, block.meter
        if isinstance(state, InnerProducts):
            before = state.extra_flops
            found = state.of(batch)
            product_DJ, loss_sum_D, answer_tokens_D = found.product_DJ, found.loss_sum_D, found.answer_tokens_D
            meter.train(batch)
            meter.add(state.extra_flops - before)
        else:
            product_DJ, loss_sum_D, answer_tokens_D = state.of(batch)
            for _ in range(state.passes):
                meter.forward(batch)
        block.note_losses(loss_sum_D, answer_tokens_D)
        return worth(product_DJ, answer_tokens_D, self.per)
