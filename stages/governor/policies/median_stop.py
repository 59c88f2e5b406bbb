"""Stop when the best loss so far is worse than the median of earlier runs' running averages at the same FLOPs.

Source: Golovin et al. 2017, "Google Vizier", section 3.2.2, the median stopping rule; time is FLOPs.
"""

from __future__ import annotations

from statistics import median

from pydantic import Field

from data_contracts.cost import Budget
from stages.governor.policy import Choice, Number, Policy, closing, evidence, obliged, onward
from stages.governor.records import RecordedCurve
from stages.governor.state import State


class MedianStop(Policy):
    """End once the run's best is above the median of the records' means up to here."""

    curves: tuple[RecordedCurve, ...] = Field((), description="Earlier runs, the metric along FLOPs.")
    grace_flops: int = Field(0, ge=0, description="FLOPs before which nothing is stopped.")
    least_records: int = Field(3, ge=1, description="Records that reach this far, below which nothing is stopped.")

    def decide(self, state: State, remaining: Budget, allowed: frozenset[str]) -> Choice:
        """Return one of `allowed`: the end where the rule says so, else going on."""
        numbers: dict[str, Number] = {**evidence(state), "policy_grace_flops": self.grace_flops}
        forced = obliged(state, remaining, allowed)
        if forced:
            return Choice(action=forced[0], reason=forced[1], numbers=numbers)
        means = [mean for curve in self.curves if (mean := curve.mean_until(state.flops)) is not None]
        numbers |= {"records": len(means), "policy_curves": len(self.curves)}
        if state.flops < self.grace_flops or len(means) < self.least_records:
            reason = f"{len(means)} record(s) at {state.flops:.4g} FLOPs: too few, or too early"
            return Choice(action=onward(allowed), reason=reason, numbers=numbers)
        middle, best = median(means), state.best
        shown = state.shown(best.loss if best else None) or 0.0
        numbers["records_median"] = middle
        worse = shown > middle if state.direction == "minimise" else shown < middle
        reason = f"the best so far, {shown:.4g}, against a median of {middle:.4g} of {len(means)} record(s)"
        return Choice(action=closing(allowed) if worse else onward(allowed), reason=reason, numbers=numbers)
