"""Influence: how far one training step on an example lowers the target's loss, for the price of training on it once.

The score of example i for target group j is ⟨gᵢ, D Ḡⱼ⟩: gᵢ the gradient of what one visit of the example adds to a
step's loss, Ḡⱼ the mean over the group of each example's mean answer-token gradient, D = 1/(√v̂ + ε) from the
checkpoint's Adam moments. Nothing is projected or stored: D Ḡⱼ is fixed, and each example's product with it is read in
one batched forward and backward pass; or, for one group in float32, by the difference of two forward passes, where that
is seen to give the same number. Source: Xia et al. 2024 (LESS), the preconditioner moved to the target, where it
is exact. LESS divides gᵢ by its tokens and norm; training here weighs each answer token alike, so a visit adds the sum.
Given several checkpoints, it is the mean weighted by their learning rates, all in memory (the backward form each).
With `store_bits` the same pass leaves each gᵢ, projected, as an artifact: its product with `Projection.project(D Ḡ,
dual=True)` estimates the influence for any later target, at any checkpoint's moments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from stages.gradients.quantised import Quantiser
from stages.score.features import FeatureScorer
from stages.score.scorer import Block, Given
from stages.score.target import adam_settings, checkpoint_weights, target_directions, worth

if TYPE_CHECKING:
    from torch import Tensor

    from data_contracts.records import Plan
    from stages.gradients.differences import Differences
    from stages.gradients.inner_product import InnerProducts
    from stages.gradients.low_rank import Factors

FORWARD_STEP, FORWARD_ERROR, FORWARD_ROWS = 1e-4, 0.01, 256
"""The forward form is taken where this step (‖εd‖ / ‖θ‖) is off by at most this share of the products of target rows;
a pool of fewer rows does not pay for finding out."""
LOW_RANK_ROWS = 4096
"""Fewer rows do not pay for decomposing directions."""
CALIBRATION_ROWS = 16
SEED = 0
"""Of the projections of stored features: fixed, so that any later run can compare with them."""


class Influence(FeatureScorer):
    """⟨gradient of the example, preconditioned mean gradient of the target⟩; positive lowers the target's loss."""

    reads = frozenset({"tokens", "model", "moments", "checkpoints"})
    supported = True
    grouped = True

    per: Literal["visit", "token"] = Field(
        "visit",
        description="What the score is worth: one visit of the example (for quotas of rows), or each of its answer "
        "tokens (for quotas of tokens; short answers rank higher).",
    )
    form: Literal["auto", "backward"] = Field(
        "auto",
        description="By forward and backward passes; or by forward passes alone where those are cheaper (one target "
        f"group, float32, at least {FORWARD_ROWS} rows) and off by at most {FORWARD_ERROR:.0%} on target rows, or "
        "where the plan's memory has no room for activations.",
    )
    rank_error: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="Directions of wide layers are cut to the rank at which the products of target rows are off by at "
        f"most this share, in a pool of at least {LOW_RANK_ROWS} rows (backward form); 0 keeps them whole.",
    )
    per_layer: int = Field(
        16, ge=1, le=1024, description="With `store_bits`: numbers kept of each side of a linear layer's gradient."
    )
    metric: Literal["plain", "adam"] = Field(
        "plain",
        description="With `store_bits`: gradients as they are, for any later target; or times √D of this checkpoint (D "
        "of rank one), so that products of rows are the optimizer's.",
    )

    def prepare(self, given: Given) -> list[tuple[float, InnerProducts | Differences]]:
        """Open every checkpoint, each with its weight: its groups' preconditioned mean gradients and taps, or steps.

        Raises `InputError` where there is no target, or a target row has no token to predict.
        """
        found = []
        for trained, weight in zip(given.checkpoints, checkpoint_weights(given), strict=True):
            found.append((weight, self._opened(replace(given, trained=trained))))
            trained.moments.clear()
        return found

    def _opened(self, given: Given) -> InnerProducts | Differences:
        from stages.gradients.inner_product import InnerProducts
        from stages.gradients.projection import Projection

        assert given.trained is not None
        model, newest = given.trained.model, given.trained is given.checkpoints[-1]
        free = self.form == "auto" and not self.keeps_features and len(given.checkpoints) == 1
        plan, groups = given.plan, len(given.groups)
        if plan is not None and plan.short_of_memory(groups):
            needs = f"{plan.backward_bytes(groups):,} bytes, {plan.allowed_bytes:,} are allowed"
            if free:
                return self._frugal(replace(given, batch_tokens=1), needs)
            given.notice(f"influence: keeping the activations of one row needs {needs}; what is asked for needs them")
        directions = target_directions(given)
        forward = self._forward(given, directions) if free else None
        given.facts["form"] = "backward" if forward is None else "forward"
        if forward is not None:
            return forward
        sides = (self.per_layer, self.per_layer)
        adam = adam_settings(given) if self.metric == "adam" else {}
        features = Projection(model, per_layer=sides, seed=SEED, **adam) if self.keeps_features and newest else None
        factors = self._factors(given, directions)
        products = InnerProducts(model, directions, factors=factors, autocast=given.autocast, beside=features)
        return given.resources.enter_context(products)

    def _forward(self, given: Given, directions: dict[str, Tensor]) -> Differences | None:
        """Return the forward form where it is cheaper and seen to be right."""
        import torch

        from stages.gradients.branches import differences_of
        from stages.score.step import calibrate

        assert given.trained is not None
        narrow = given.autocast is not None or any(torch.finfo(d.dtype).bits < 32 for d in directions.values())
        if narrow or len(given.groups) > 1 or given.pool_rows < FORWARD_ROWS:
            return None
        found = differences_of(given.trained.model, directions, None, central=True)
        (error,) = calibrate(found, given, CALIBRATION_ROWS, (FORWARD_STEP,))
        given.facts["step_error"] = f"{error:.2g}"
        return found if error <= FORWARD_ERROR else None

    def _frugal(self, given: Given, needs: str) -> Differences:
        """Return the forward form at its best step, whatever its error; the target's rows go one by one."""
        from stages.gradients.branches import differences_of
        from stages.gradients.differences import STEPS
        from stages.score.step import calibrate

        assert given.trained is not None
        found = differences_of(given.trained.model, target_directions(given), given.autocast, central=True)
        error = max(calibrate(found, given, CALIBRATION_ROWS, STEPS))
        given.facts.update(form="forward", form_for="memory", step_error=f"{error:.2g}")
        given.notice(
            f"influence: keeping the activations of one row needs {needs}; scores are differences of forward passes, "
            f"off by {error:.1%} of the products of target rows"
        )
        return found

    def _factors(self, given: Given, directions: dict[str, Tensor]) -> dict[str, Factors]:
        """Return thin factors of wide layers' directions, taken out of `directions`, where they pay and are right."""
        if self.rank_error == 0 or given.pool_rows < LOW_RANK_ROWS:
            return {}
        from stages.score.ranks import low_rank

        return low_rank(given, directions, limit=self.rank_error, rows=LOW_RANK_ROWS)

    @classmethod
    def regime(cls, rows: int, groups: int, plan: Plan | None) -> str:
        """Return whether the forward form and low ranks are thought of."""
        if plan is not None and plan.short_of_memory(groups):
            return "short"
        return "few" if rows < FORWARD_ROWS else "many" if rows < LOW_RANK_ROWS else "most"

    def score(self, block: Block, state: list[tuple[float, InnerProducts | Differences]]) -> np.ndarray:
        """Return score_BJ; NaN where nothing is predicted. Losses and features are of the newest checkpoint."""
        parts = [weight * self._products(block, one) for weight, one in state]
        return np.asarray(sum(parts[1:], parts[0]))

    def _products(self, block: Block, one: InnerProducts | Differences) -> np.ndarray:
        from stages.gradients.inner_product import InnerProducts
        from stages.gradients.projection import Projection

        batch, meter = block.tokens, block.meter
        if isinstance(one, InnerProducts):
            before = one.extra_flops
            found = one.of(batch)
            product_DJ, loss_sum_D, answer_tokens_D = found.product_DJ, found.loss_sum_D, found.answer_tokens_D
            meter.train(batch)
            meter.add(one.extra_flops - before)
            if self.store_bits and isinstance(one.beside, Projection):
                meter.add(one.beside.flops(*batch.shape))
                feature_BK = np.asarray(one.beside.feature_DK.float().cpu())
                block.note_features(Quantiser(one.beside.dimensions, self.store_bits), feature_BK)
        else:
            product_DJ, loss_sum_D, answer_tokens_D = one.of(batch)
            for _ in range(one.passes):
                meter.forward(batch)
            meter.add(one.extra_flops(batch))
        block.note_losses(loss_sum_D, answer_tokens_D)
        return worth(product_DJ, answer_tokens_D, self.per)
