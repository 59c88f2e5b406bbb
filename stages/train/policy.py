"""Asking the governor's policy inside a segment: go on, decay now, or end here.

The one place where training meets the policy's form. It sees this segment's rows, after one that stands for the
evaluation the segment started from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data_contracts.cost import Budget, Cost
from data_contracts.direction import Direction
from data_contracts.method import resolve
from stages.governor.policy import INSIDE, Choice, Policy, forgetting
from stages.governor.state import Retention, State


def ask(
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    start: Mapping[str, Any] | None,
    remaining: Budget,
    spent: Cost,
    rest_flops: int,
    annealing: bool,
    metric: str,
    direction: Direction,
    retention: Retention | None = None,
) -> Choice:
    """Return the policy's choice after an evaluation.

    Args:
        settings: the policy's method mapping.
        rows: curve rows of this segment so far; the last one holds a validation loss.
        start: the evaluation that the segment started from (see `position.stated`), where known.
        remaining: budget at the segment's start.
        spent: by this segment so far.
        rest_flops: of the segment's steps to come.
        metric, direction: which column of the curve is watched, and where it improves.
        annealing: whether the segment decays: then it is carried to its end, unless too much is forgotten.
        retention: where the loss on the retention set began, and how far it may rise; None where there is none.
    """
    known = list(rows)
    if start is not None and (not rows or rows[0]["step"] > start["step"]):
        before = {"step": start["step"], "flops": 0, "tokens": 0}
        watched = {name: start.get(name) for name in ("retention_loss", "retention_se", "retention_rise_se")}
        known.insert(0, before | watched | {"validation_loss": start["loss"], "validation_se": start["se"]})
    state = State.from_rows([known], metric=metric, direction=direction, horizon=rest_flops, retention=retention)
    forgot = forgetting(state, INSIDE)
    if forgot:
        return forgot
    if annealing:
        return Choice(action="continue", reason="the decay has begun")
    policy = resolve(Policy, settings, "govern.policy")
    return policy.decide(state, remaining.minus(spent), INSIDE)
