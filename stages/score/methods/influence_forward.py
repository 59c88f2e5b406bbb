"""Forward-only influence: the same number as `influence`, from losses alone, without a backward pass over the pool.

⟨gᵢ, d⟩ with d = D Ḡⱼ is the derivative of the example's loss ℓᵢ along d, so [ℓᵢ(θ + εd) − ℓᵢ(θ − εd)] / 2ε gives it up
to ε² and to rounding / ε. No activation is kept, nothing is hooked: it works where the model cannot be tapped or a
backward pass does not fit. A group costs two forward passes, or one where `difference` is one-sided (and one for all
groups together, error ε instead of ε²). ε is chosen for each group by its measured error: on some target rows, against
the exact product of their gradients. Source: Malladi et al. 2023 (MeZO) for the difference, Xia et al. 2024 (LESS) for
what is differentiated.
Of a LoRA checkpoint only the adapters move, as branches beside them: both sides of a difference are two slots of one
batch, and the frozen layers may be held in four bits (`frozen: nf4`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from stages.score.scorer import Block, Given, Scorer
from stages.score.target import target_directions, worth

if TYPE_CHECKING:
    from stages.gradients.differences import Differences

ROUGH = 0.1
"""A relative error of this much is told to the user."""


class InfluenceForward(Scorer):
    """Derivative of the example's loss along the preconditioned mean gradient of the target, by finite difference."""

    reads = frozenset({"tokens", "model", "moments"})
    supported = True
    passes = "forward"
    grouped = True

    per: Literal["visit", "token"] = Field(
        "visit", description="What the score is worth: one visit of the example, or each of its answer tokens."
    )
    difference: Literal["central", "one_sided"] = Field(
        "central", description="Two passes a group and error ε², or one (plus one for all groups) and error ε."
    )
    frozen: Literal["float", "nf4"] = Field(
        "float",
        description="Of a LoRA checkpoint: frozen linear layers as they are, or in four bits (needs bitsandbytes): an "
        "eighth of their memory once the model is loaded, and the influence on that model.",
    )
    calibration_rows: int = Field(
        16, ge=1, le=1024, description="Target rows on which ε is chosen and its error measured."
    )

    def prepare(self, given: Given) -> Differences:
        """Compute each group's direction and choose its ε; the summary gets ε and error.

        Raises `InputError` where there is no target, or a target row has no token to predict.
        """
        from stages.gradients.branches import differences_of
        from stages.gradients.differences import STEPS
        from stages.score.step import calibrate

        assert given.trained is not None
        model = given.trained.model
        if self.frozen == "nf4":
            from stages.model.nf4 import hold_in_nf4

            given.facts["layers_in_nf4"] = hold_in_nf4(model)
        central = self.difference == "central"
        found = differences_of(model, target_directions(given), given.autocast, central=central)
        error_J = calibrate(found, given, self.calibration_rows, STEPS)
        given.trained.moments.clear()
        given.facts["step"] = ", ".join(f"{step:g}" for step in found.step_J)
        given.facts["step_error"] = ", ".join(f"{error:.2g}" for error in error_J)
        if max(error_J) > ROUGH:
            given.notice(
                f"influence_forward: the best step is off by {max(error_J):.0%} of the products on target rows; "
                "use `influence`, or plan for float32"
            )
        return found

    def score(self, block: Block, state: Differences) -> np.ndarray:
        """Return score_BJ; NaN where nothing is predicted."""
        batch = block.tokens
        product_DJ, loss_sum_D, answer_tokens_D = state.of(batch)
        for _ in range(state.passes - 1):  # the engine counts one
            block.meter.forward(batch)
        block.meter.add(state.extra_flops(batch))
        block.note_losses(loss_sum_D, answer_tokens_D)
        return worth(product_DJ, answer_tokens_D, self.per)
