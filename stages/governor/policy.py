"""The family of policies: one rule that decides inside training and between rounds alike.

A policy is pure: equal states, budgets and allowed actions give equal choices, and every number that a choice was made
from stands in it. None is asked where the model has forgotten more than is allowed (`forgetting`). Carrying the choice
out, and what a segment may spend, belong to `train` and `govern`.

Inside training:  choice = policy.decide(State.from_rows([rows so far], horizon=rest of the segment's FLOPs),
                                         remaining budget of the run, INSIDE)
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from data_contracts.cost import STOCKS, Budget, Frozen
from data_contracts.method import Method
from stages.governor.state import Drift, State

INSIDE = frozenset({"continue", "anneal", "end"})
"""What may be chosen after an evaluation inside a segment: go on, start the decay now, end the segment here."""
BETWEEN = frozenset({"continue", "reselect", "anneal", "stop"})
"""What may be chosen between segments; `remix` too where a mixture follows training, `reallocate` where a new plan pays
or is owed."""

Number = float | int | str | bool | None


class Choice(Frozen):
    """An action, why, and every number it was made from."""

    action: str
    reason: str
    numbers: dict[str, Number] = Field(default_factory=dict)


class Policy(Method):
    """A rule over (state, remaining budget, allowed actions)."""

    family: ClassVar[str] = "policies"
    home: ClassVar[str] = "stages.governor.policies"

    def decide(self, state: State, remaining: Budget, allowed: frozenset[str]) -> Choice:
        """Return one of the `allowed` actions. `remaining` is what is left of the run's budget."""
        raise TypeError(f"{type(self).__name__} defines no decide")


def ending(allowed: frozenset[str]) -> str:
    """Return the action that ends things here: `end` inside training, `stop` between rounds."""
    return "end" if "end" in allowed else "stop"


def first(allowed: frozenset[str], *preferred: str) -> str:
    """Return the first of `preferred` that is allowed, else the action that ends things here."""
    return next((action for action in preferred if action in allowed), ending(allowed))


def obliged(state: State, remaining: Budget, allowed: frozenset[str]) -> tuple[str, str] | None:
    """Return (action, reason) where no rule has a choice, else None.

    A loss that is not finite or a used-up budget ends, a decay runs to its end inside training and ends a run between
    rounds, and nothing is judged before the first evaluation.
    """
    inside = "end" in allowed
    if state.non_finite_steps:
        return ending(allowed), f"the loss is not finite at step {', '.join(map(str, state.non_finite_steps))}"
    empty = [stock for stock in STOCKS if getattr(remaining, stock) == 0]
    if empty:
        return ending(allowed), f"the budget is used up: {', '.join(empty)}"
    if state.annealed:
        return (
            (first(allowed, "continue"), "the decay runs to its end")
            if inside
            else (
                "stop",
                "the learning rate has been annealed to its end",
            )
        )
    if not state.evaluations:
        return first(allowed, "continue", "anneal"), "nothing has been evaluated yet"
    return None


def forgetting(state: State, allowed: frozenset[str]) -> Choice | None:
    """Return the end where the latest evaluation has forgotten more than is allowed, else None.

    Asked before any policy, so that none can pass over it; a decay that has begun is ended too.
    """
    point = state.retained
    if point is None or state.retention is None or not state.forgot(point):
        return None
    rise, error = state.rise(point) or (0.0, 0.0)
    reason = (
        f"what must not be forgotten is: the retention loss has risen by {rise:.4g} nats (standard error {error:.2g}) "
        f"from {state.retention.loss:.4g}, more than the {state.retention.allowed:g} allowed"
    )
    return Choice(action=ending(allowed), reason=reason, numbers=evidence(state))


def drifted(state: State, allowed: frozenset[str], least_agreement: float) -> str | None:
    """Return why the selection in force is held to be stale; None where it is not, or nothing tells.

    Another target always says so. A ranking that has moved says so where the two latest scorings agree less than
    `least_agreement`, and not again for the selection made because of it: between two of these stands another decision.
    """
    drift = state.drift
    if drift is None or "reselect" not in allowed:
        return None
    if drift.target_shared is not None:
        same = f"{drift.target_shared:.0%} of its rows are the same"
        return f"the target is another than that of the latest selection: {same}"
    if drift.answered or drift.agreement is None or drift.agreement >= least_agreement:
        return None
    return f"the ranking has moved: the two latest scorings agree by {drift.agreement:.2f}, below {least_agreement:g}"


def onward(allowed: frozenset[str]) -> str:
    """Return the action of a rule that goes on: with a new choice of data between rounds, as it is inside training."""
    return first(allowed, "reselect", "reallocate", "continue", "anneal")


def same_data(allowed: frozenset[str]) -> str:
    """Return the action that goes on with the data in force: under a new plan where one is offered."""
    return first(allowed, "reallocate", "continue", "anneal")


def closing(allowed: frozenset[str]) -> str:
    """Return the action of a rule that has seen enough: the end inside training, the closing decay between rounds."""
    return "end" if "end" in allowed else first(allowed, "anneal")


def evidence(state: State) -> dict[str, Number]:
    """Return the numbers that every choice carries: what was seen, and the best of it, in the metric's own sense.

    `evaluations` counts all, `non_finite_steps` lists the steps whose loss was not finite ("30, 40"; "" for none). What
    has drifted stands there where something tells, and so does a new plan that pays or is owed.
    """
    drift, anew = state.drift or Drift(), state.reallocation
    moved = {"target_rows_shared": drift.target_shared, "ranking_agreement": drift.agreement}
    best = state.best
    last = state.attempts[-1] if state.attempts else None
    shown = state.shown(last.loss) if last and last.finite else None
    return {
        "evaluations": len(state.attempts),
        "segments": state.last_segment + 1,
        "training_flops": state.flops,
        "best_step": best.step if best else None,
        "best_loss": state.shown(best.loss) if best else None,
        "last_step": last.step if last else None,
        "last_loss": shown,
        "non_finite_steps": ", ".join(map(str, state.non_finite_steps)),
        "direction": state.direction,
        **{name: value for name, value in moved.items() if value is not None},
        **({"ranking_rows": drift.rows} if drift.rows else {}),
        **({"new_plan": anew.reason, "new_plan_speed_up": anew.speed_up} if anew else {}),
        **_retention(state),
    }


def _retention(state: State) -> dict[str, Number]:
    """Return what is known of forgetting; nothing where no retention set is watched."""
    point = state.retained
    if point is None or state.retention is None:
        return {}
    rise, error = state.rise(point) or (None, None)
    return {
        "retention_began": finite(state.retention.loss),
        "retention_loss": finite(point.retention),
        "retention_rise": finite(rise),
        "retention_rise_se": finite(error),
        "most_forgotten_nats": state.retention.allowed,
    }


def finite(value: float | None) -> float | None:
    """Return `value`, or None where it is infinite or not a number (a record holds finite numbers only)."""
    return value if value is not None and math.isfinite(value) else None
