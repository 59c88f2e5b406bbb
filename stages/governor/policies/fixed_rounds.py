"""Go on for a fixed number of rounds, whatever the curve says: the baseline of a schedule without a governor.

It ends early only where it must: a loss that is not finite, or a used-up budget.
"""

from __future__ import annotations

from pydantic import Field

from data_contracts.cost import Budget
from stages.governor.policy import Choice, Policy, closing, evidence, obliged, onward
from stages.governor.state import State


class FixedRounds(Policy):
    """Choose data anew after every segment, `rounds` times, then anneal; inside a segment always go on."""

    rounds: int = Field(4, ge=0, description="Segments after the first, each on newly chosen data.")

    def decide(self, state: State, remaining: Budget, allowed: frozenset[str]) -> Choice:
        """Return one of `allowed`: going on while fewer than `rounds` segments followed the first."""
        done = max(0, state.last_segment)
        forced = obliged(state, remaining, allowed)
        if forced:
            action, reason = forced
        elif "end" not in allowed and done >= self.rounds:
            action, reason = closing(allowed), f"all {self.rounds} round(s) are used"
        else:
            action, reason = onward(allowed), f"{done} of {self.rounds} round(s) are used"
        return Choice(action=action, reason=reason, numbers={**evidence(state), "policy_rounds": self.rounds})
