"""Stop after a number of evaluations without improvement: the usual baseline.

An evaluation improves when it is finite and lower than the best before it by more than `min_delta`; one that is not
finite never does. Between rounds it re-selects as long as rounds and budget last, and anneals before it stops.
Source: Prechelt 1998, "Early stopping — but when?", the UP criterion with strips of one evaluation.
"""

from __future__ import annotations

from pydantic import Field

from data_contracts.cost import STOCKS, Budget
from stages.governor.policy import Choice, Policy, ending, evidence, first, onward
from stages.governor.state import State


class Patience(Policy):
    """End once `patience` evaluations in a row did not improve on the best."""

    patience: int = Field(5, ge=1, description="Evaluations in a row without improvement.")
    min_delta: float = Field(0.0, ge=0, description="Least improvement that counts, in the metric's unit.")

    def decide(self, state: State, remaining: Budget, allowed: frozenset[str]) -> Choice:
        """Return one of `allowed`: the end when patience or budget is used up, else going on."""
        best, since = None, 0
        for point in state.attempts:
            if point.finite and (best is None or (point.loss or 0.0) < best - self.min_delta):
                best, since = float(point.loss or 0.0), 0
            else:
                since += 1
        numbers = {
            **evidence(state),
            "evaluations_since_best": since,
            "policy_patience": self.patience,
            "policy_min_delta": self.min_delta,
        }
        empty = [stock for stock in STOCKS if getattr(remaining, stock) == 0]
        if empty:
            action, reason = ending(allowed), f"the budget is used up: {', '.join(empty)}"
        elif state.annealed and "stop" in allowed:
            action, reason = "stop", "the learning rate has been annealed to its end"
        elif since >= self.patience:
            broken = state.non_finite_steps
            note = f"; the loss was not finite at step {', '.join(map(str, broken))}" if broken else ""
            reason = f"{since} evaluations in a row without improvement{note}"
            usable = bool(state.evaluations) and not broken and not state.annealed
            action = first(allowed, "anneal") if usable and "end" not in allowed else ending(allowed)
        else:
            action = onward(allowed)
            reason = f"{since} of {self.patience} evaluations without improvement"
        return Choice(action=action, reason=reason, numbers=numbers)
