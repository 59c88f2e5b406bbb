"""Go on while the next segment is expected to buy enough; else choose data anew, anneal, or stop.

The marginal gain G = −ΔL/ΔFLOPs is fitted to the latest evaluations (`gain.py`). What a step would buy is G times the
FLOPs it would spend, at its upper confidence bound: a run is not ended on noise. Re-selection is judged by what it
brought before in this run, against the cost of scoring. Beside the nats of the next step, G itself may have a threshold
τ: a price in nats a FLOP, or a share κ of the mean gain since the warm-up that rises as the budget shrinks.
Source: the one-step look-ahead rule, optimal where G falls (the monotone case of Chow & Robbins 1961); the annealing
reserve follows warm-up/stable/decay schedules.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pydantic import Field

from data_contracts.cost import STOCKS, Budget
from stages.governor.gain import Gain, Rise, best_new_data, marginal_gain, rise_since_best
from stages.governor.policy import Choice, Number, Policy, drifted, ending, evidence, finite, first, same_data
from stages.governor.state import State


class MarginalGain(Policy):
    """Compare what the next segment is expected to buy with a threshold, and with what a re-selection bought."""

    window: int = Field(5, ge=3, le=64, description="Latest evaluations that the gain is fitted to.")
    robust: bool = Field(False, description="Fit the median of pairwise slopes, which wild evaluations do not move.")
    confidence: float = Field(0.9, gt=0.5, lt=1, description="Of each one-sided bound.")
    min_gain_nats: float = Field(
        0.04, ge=0, description="Nats of validation loss that the next segment must be able to bring (upper bound)."
    )
    price: float = Field(0.0, ge=0, description="λ: nats of validation loss that a FLOP must be able to bring.")
    kappa: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the mean gain a FLOP since the warm-up that a FLOP must be able to bring; 0: none.",
    )
    kappa_rise: float = Field(
        0.0, ge=0, description="k₁: the share is κ·(1 + k₁·(1 − B/B₀)), B what is left of the budget B₀ for training."
    )
    consecutive: int = Field(
        1, ge=1, description="Evaluations of the segment in a row at which going on must not pay before it ends."
    )
    anneal_share: float = Field(
        0.15, gt=0, le=1, description="FLOPs kept for the closing decay, as a share of those trained so far."
    )
    hysteresis: float = Field(0.1, ge=0, description="How much better than going on a re-selection must pay.")
    freshness: float = Field(
        0.5, gt=0, le=1, description="Gain of the next re-selection as a share of the last, until two were seen."
    )
    least_agreement: float = Field(
        0.0,
        ge=-1,
        le=1,
        description="Rank correlation of the two latest scorings below which data are chosen anew; -1: never.",
    )
    overfit_evaluations: int = Field(2, ge=1, description="Evaluations that the best must lie back to call over-fit.")

    def decide(self, state: State, remaining: Budget, allowed: frozenset[str]) -> Choice:
        """Return one of `allowed`; every number and threshold used stands in the choice."""
        gain = marginal_gain(state, self.window, self.confidence, robust=self.robust)
        rise = rise_since_best(state)
        numbers = self._numbers(state, remaining, gain, rise)

        def choose(action: str, reason: str) -> Choice:
            return Choice(action=action, reason=reason, numbers=numbers)

        end = ending(allowed)
        inside = end == "end"
        broken = [point.step for point in state.points if point.broken and point.segment == state.last_segment]
        if broken:
            return choose(end, f"the loss is not finite at step {', '.join(map(str, broken))}")
        if not state.evaluations:
            return choose(first(allowed, "continue") if inside else end, "nothing has been evaluated yet")
        empty = [stock for stock in STOCKS if getattr(remaining, stock) == 0]
        if empty:
            return choose(end, f"the budget is used up: {', '.join(empty)}")
        if state.annealed:
            if inside:
                return choose(first(allowed, "continue"), "the decay runs to its end")
            return choose(end, "the learning rate has been annealed to its end")
        if rise and rise.age >= self.overfit_evaluations and self._rises(gain, rise):
            return choose(
                end, f"validation loss rises: {rise.nats:.4g} nats above its best, {rise.age} evaluations ago"
            )
        left = math.inf if remaining.flops is None else remaining.flops
        reserve = self.anneal_share * state.flops
        if not inside and left < reserve:
            return choose(end, "the budget is used up: less is left than the closing decay needs")
        stale = drifted(state, allowed, self.least_agreement)
        if not inside and state.last_segment == 0 and "reselect" in allowed:
            numbers |= {"drift": True} if stale else {}
            return choose("reselect", stale or "the warm-up has given what scoring and planning need")
        if left < (reserve if inside else self._horizon(state) + reserve):
            return choose(first(allowed, "anneal", "continue"), "the budget affords only the closing decay")
        if stale:
            numbers["drift"] = True
            return choose("reselect", stale)
        return choose(*self._weigh(state, gain, left, allowed, numbers))

    def _weigh(
        self, state: State, gain: Gain | None, left: float, allowed: frozenset[str], numbers: dict[str, Number]
    ) -> tuple[str, str]:
        """Compare going on, choosing anew and ending by what each is expected to buy."""
        horizon = self._horizon(state)
        upper = math.inf if gain is None else gain.high * horizon
        pays = self._paid_lately(state, left)
        numbers["threshold_nats_per_flop"] = self.threshold(state, left)
        anew, weighed = best_new_data(state, horizon, math.inf, self.freshness, self.min_gain_nats, allowed)
        numbers |= weighed
        if anew is not None:
            affordable = left >= anew.flops + self.anneal_share * state.flops
            going_on = max(gain.rate, 0.0) if gain is not None else 0.0
            if affordable and (anew.value > (1 + self.hysteresis) * going_on or not pays):
                return anew.action, f"{anew.said}, more a FLOP than going on"
        if pays:
            if gain is None:
                return same_data(allowed), "too few evaluations to tell the gain"
            return same_data(allowed), f"{horizon:.3g} FLOPs more may bring {upper:.4g} nats"
        least = max(self.min_gain_nats, self.threshold(state, left) * horizon)
        reason = f"the next {horizon:.3g} FLOPs bring at most {upper:.4g} nats, below {least:.4g}"
        return (ending(allowed) if "end" in allowed else first(allowed, "anneal")), reason

    def threshold(self, state: State, left: float) -> float:
        """Return τ, nats a FLOP: the price, or κ times the mean gain since the warm-up where that is more.

        The mean is taken from the end of the warm-up (of the first segment, where it is seen, else from the segment's
        first evaluation) to the latest evaluation; B₀ is what is left and what was trained.
        """
        if not self.kappa:
            return self.price
        begun = state.segment(0)[-1 if state.last_segment else 0]
        now = state.evaluations[-1]
        if now.flops <= begun.flops:
            return self.price
        mean = (float(begun.loss or 0.0) - float(now.loss or 0.0)) / (now.flops - begun.flops)
        spent = 0.0 if math.isinf(left) else state.flops / (state.flops + left)
        return max(self.price, self.kappa * (1 + self.kappa_rise * spent) * mean)

    def _paid_lately(self, state: State, left: float) -> bool:
        """Return whether going on paid at any of the latest `consecutive` evaluations of the segment, or it has fewer.

        What was left then, of the budget and of the segment, is what is left now and what was spent since.
        """
        horizon, seen = self._horizon(state), [p for p in state.points if p.segment == state.last_segment and p.finite]
        if len(seen) < self.consecutive:
            return True
        moments = [(state, left, horizon)]
        for point in seen[-2::-1][: self.consecutive - 1]:
            since = state.flops - point.flops
            then = replace(state, points=state.points[: state.points.index(point) + 1])
            moments.append((then, left + since, self._horizon(then) + (since if state.horizon is not None else 0)))
        return any(self._pays(*moment) for moment in moments)

    def _pays(self, state: State, left: float, horizon: float) -> bool:
        """Return whether the upper bound of the gain reaches both thresholds."""
        gain = marginal_gain(state, self.window, self.confidence, robust=self.robust)
        if gain is None:
            return True
        threshold = self.threshold(state, left)
        return gain.high * horizon >= self.min_gain_nats and (not threshold or gain.high >= threshold)

    def _rises(self, gain: Gain | None, rise: Rise) -> bool:
        return rise.nats > 0 and (rise.p_value < 1 - self.confidence or (gain is not None and gain.high < 0))

    @staticmethod
    def _horizon(state: State) -> float:
        return float(state.segment_flops(state.last_segment) if state.horizon is None else state.horizon)

    def _numbers(self, state: State, remaining: Budget, gain: Gain | None, rise: Rise | None) -> dict[str, Number]:
        horizon = self._horizon(state)
        return {
            **evidence(state),
            "remaining_flops": remaining.flops,
            "horizon_flops": int(horizon),
            "anneal_reserve_flops": int(self.anneal_share * state.flops),
            "gain_points": gain.points if gain else 0,
            "gain_nats_per_flop": gain.rate if gain else None,
            "gain_low": finite(gain.low) if gain else None,
            "gain_high": finite(gain.high) if gain else None,
            "expected_nats": gain.rate * horizon if gain else None,
            "expected_nats_upper": finite(gain.high * horizon) if gain else None,
            "rise_nats": rise.nats if rise else None,
            "rise_p_value": rise.p_value if rise else None,
            "rise_age": rise.age if rise else None,
            "reselect_flops": state.reselect_flops,
            **{f"policy_{name}": value for name, value in self.model_dump().items()},
        }
