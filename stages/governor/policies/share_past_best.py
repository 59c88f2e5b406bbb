"""Stop once a fixed share of what the best point had cost is spent without a better one.

A patience that grows with the run: FLOPs since the best evaluation, as a share of the FLOPs at the best. The rule of
Elastic's ml-cpp for the number of trees.
"""

from __future__ import annotations

from pydantic import Field

from data_contracts.cost import Budget
from stages.governor.policy import Choice, Number, Policy, closing, evidence, obliged, onward
from stages.governor.state import State


class SharePastBest(Policy):
    """End once the FLOPs since the best exceed `share` of those at the best."""

    share: float = Field(0.2, gt=0, description="FLOPs past the best, as a share of the FLOPs at the best.")
    least: int = Field(3, ge=1, description="Evaluations past the best, below which nothing is stopped.")

    def decide(self, state: State, remaining: Budget, allowed: frozenset[str]) -> Choice:
        """Return one of `allowed`: the end where the share is used up, else going on."""
        best = state.best
        past = sum(point.flops > best.flops for point in state.evaluations) if best else 0
        since = state.flops - best.flops if best else 0
        numbers: dict[str, Number] = {
            **evidence(state),
            "flops_past_best": since,
            "evaluations_past_best": past,
            "policy_share": self.share,
            "policy_least": self.least,
        }
        forced = obliged(state, remaining, allowed)
        if forced:
            action, reason = forced
        else:
            used = best is not None and past >= self.least and since > self.share * best.flops
            action = closing(allowed) if used else onward(allowed)
            reason = f"{since:.4g} FLOPs past the best at {best.flops if best else 0:.4g}, share {self.share:g}"
        return Choice(action=action, reason=reason, numbers=numbers)
