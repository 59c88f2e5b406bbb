"""Go on while the curve, continued, still promises enough for what is left.

A bank of falling shapes is fitted to the latest segment (`curve_bank.py`); what the rest of the segment (inside
training) or of the budget (between rounds) would take off the loss is judged at its upper quantile, so that doubt goes
on. A rising loss is no matter of the bank, which cannot rise, and ends first. Between rounds data are chosen anew while
re-selections of this run promise enough, whatever is left of the present curve. It looks further ahead than
`marginal_gain`, whose straight line promises too much over long horizons.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data_contracts.cost import Budget
from stages.governor.curve_bank import effective_tokens, fit_curve
from stages.governor.gain import best_new_data, rise_since_best, window_of
from stages.governor.policy import Choice, Number, Policy, closing, drifted, ending, evidence, obliged, same_data
from stages.governor.state import State


class GainLeft(Policy):
    """End once the upper quantile of the gain that is left falls below `min_gain_nats`."""

    min_gain_nats: float = Field(0.005, ge=0, description="Nats that all that is left must be able to bring.")
    level: float = Field(0.2, gt=0, lt=1, description="Of the two-sided interval whose upper end is judged.")
    least: int = Field(6, ge=4, description="Evaluations of a segment, below which it goes on.")
    window: int = Field(64, ge=4, description="Latest evaluations that are fitted.")
    overfit_evaluations: int = Field(2, ge=1, description="Evaluations that the best must lie back to call over-fit.")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="With which a rise must be shown.")
    freshness: float = Field(
        0.5, gt=0, le=1, description="Gain of the next re-selection as a share of the last, until two were seen."
    )
    least_agreement: float = Field(
        0.0,
        ge=-1,
        le=1,
        description="Rank correlation of the two latest scorings below which data are chosen anew; -1: never.",
    )
    unique_tokens: int | None = Field(
        None, ge=1, description="Different tokens in the data: repeated ones then count by Muennighoff's law."
    )

    def decide(self, state: State, remaining: Budget, allowed: frozenset[str]) -> Choice:
        """Return one of `allowed`; every number and threshold used stands in the choice."""
        horizon = float(state.segment_flops(state.last_segment) if state.horizon is None else state.horizon)
        numbers: dict[str, Number] = {**evidence(state), "remaining_flops": remaining.flops}
        numbers |= {"horizon_flops": int(horizon), "reselect_flops": state.reselect_flops}
        numbers |= {f"policy_{name}": value for name, value in self.model_dump().items()}

        def choose(action: str, reason: str) -> Choice:
            return Choice(action=action, reason=reason, numbers=numbers)

        forced = obliged(state, remaining, allowed)
        if forced:
            return choose(*forced)
        if "reselect" in allowed:
            stale = drifted(state, allowed, self.least_agreement)
            if stale:
                numbers["drift"] = True
                return choose("reselect", stale)
            if state.last_segment == 0:
                return choose("reselect", "the warm-up has given what scoring and planning need")
        left = np.inf if remaining.flops is None else float(remaining.flops)
        anew, weighed = best_new_data(state, horizon, left, self.freshness, self.min_gain_nats, allowed)
        numbers |= weighed
        if anew is not None:
            return choose(anew.action, anew.said)
        rise = rise_since_best(state)
        if rise:
            numbers |= {"rise_nats": rise.nats, "rise_p_value": rise.p_value, "rise_age": rise.age}
            if rise.beyond(self.overfit_evaluations, self.confidence):
                # a segment that never was below its start leaves nothing that a decay could finish
                ends = closing(allowed) if (state.segment_gain(state.last_segment) or 0.0) > 0 else ending(allowed)
                return choose(ends, f"validation loss rises: {rise.nats:.4g} nats above its best")
        ahead = self._ahead(horizon, remaining, allowed)
        points = window_of(state, self.window)
        if len(points) < self.least or ahead <= 0:
            few = f"{len(points)} evaluation(s) are too few to continue the curve"
            return choose(same_data(allowed), few if ahead > 0 else "nothing more would be spent")
        x, now, then = self._abscissa(state, ahead)
        fitted = fit_curve(x, [point.loss or 0.0 for point in points], np.random.default_rng(0))
        if fitted is None:
            return choose(same_data(allowed), "too few evaluations to continue the curve")
        middle, low, high = fitted.gain(now, then, self.level)
        numbers |= {"ahead_flops": int(ahead), "gain_left": middle, "gain_left_low": low, "gain_left_high": high}
        numbers |= {f"weight_{name}": weight for name, weight in fitted.weights.items()}
        reason = f"{ahead:.3g} FLOPs more bring {low:.3g} to {high:.3g} nats"
        if high < self.min_gain_nats:
            return choose(closing(allowed), f"{reason}, below {self.min_gain_nats:g}")
        return choose(same_data(allowed), reason)

    @staticmethod
    def _ahead(horizon: float, remaining: Budget, allowed: frozenset[str]) -> float:
        """Return the FLOPs that are judged: the rest of the segment inside training, else of the budget."""
        if remaining.flops is None:
            return horizon
        return min(horizon, float(remaining.flops)) if "end" in allowed else float(remaining.flops)

    def _abscissa(self, state: State, ahead: float) -> tuple[np.ndarray, float, float]:
        """Return (x of each evaluation, x now, x after `ahead` FLOPs): FLOPs, or effective tokens."""
        points = window_of(state, self.window)
        last = state.points[-1]
        if self.unique_tokens is None or last.tokens == 0:
            return np.array([float(point.flops) for point in points]), float(last.flops), last.flops + ahead
        tokens = [*(float(point.tokens) for point in points), float(last.tokens)]
        worth = effective_tokens([*tokens, last.tokens * (1 + ahead / last.flops)], self.unique_tokens)
        return worth[:-2], float(worth[-2]), float(worth[-1])
