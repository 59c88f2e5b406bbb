"""The stop rule on a plain file of evaluations: the same policies, one row at a time.

Each line of the file is a JSON object with `step` and the watched metric; what must not be forgotten is
`retention_loss` (with `retention_se`, and `retention_rise_se` where evaluations were compared document by document).
The direction is settled before the first row is read; rows after the stop are never looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from data_contracts.cost import Budget, Frozen
from data_contracts.direction import Direction, direction_of
from data_contracts.errors import InputError
from data_contracts.method import resolve
from data_contracts.tables import CURVE
from stages.governor.policy import Choice, Policy, forgetting
from stages.governor.state import State

OPEN = frozenset({"continue", "end"})
RETENTION = tuple(field.name for field in CURVE.extra)


class StopReport(Frozen):
    """Where the rule stopped, what it keeps, and what it said at each evaluation."""

    metric: str
    direction: Direction
    stopped_at: int | None = Field(description="Step at which the rule stopped; None where the file ended first.")
    reason: str
    best_step: int | None
    best_value: float | None
    non_finite_steps: tuple[int, ...]
    log: tuple[str, ...] = Field(description="One line an evaluation seen.")


def replay(
    path: Path,
    policy: Mapping[str, Any],
    metric: str = "eval_loss",
    direction: Direction | None = None,
    most_forgotten: float | None = None,
) -> StopReport:
    """Feed a JSON-lines file of evaluations to the policy and return where it stops.

    Args:
        path: one JSON object a line with `step`, `metric` and, where known, `flops`.
        policy: `{method: patience, patience: 2}`.
        metric, direction: the watched value; the direction may be left out where the name is certain.
        most_forgotten: nats that `retention_loss`, then needed in each row, may rise above the first; None: any.

    Raises `ConfigError` for a direction that cannot be told, `InputError` for a file without such rows.
    """
    direction = direction_of(metric, direction)
    rule = resolve(Policy, policy, "govern.policy")
    rows: list[dict[str, Any]] = []
    log = [f"{metric} is watched; {direction} it"]
    choice, stopped = Choice(action="continue", reason="no evaluation"), None
    state = State(())
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("a file of evaluations that can be read", f"{path}: {error}", "name another file") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        rows.append(_row(path, number, line, (metric, *(["retention_loss"] if most_forgotten is not None else []))))
        state = State.from_rows([rows], metric=metric, direction=direction, most_forgotten=most_forgotten)
        choice = forgetting(state, OPEN) or rule.decide(state, Budget(), OPEN)
        log.append(f"step {rows[-1]['step']}: {metric} {rows[-1][metric]}: {choice.action}, {choice.reason}")
        if choice.action == "end":
            stopped = int(rows[-1]["step"])
            break
    if not rows:
        raise InputError("at least one evaluation", f"{path.name} holds none", "write one JSON object a line")
    best = state.best
    return StopReport(
        metric=metric,
        direction=direction,
        stopped_at=stopped,
        reason=choice.reason,
        best_step=best.step if best else None,
        best_value=state.shown(best.loss) if best else None,
        non_finite_steps=state.non_finite_steps,
        log=tuple(log),
    )


def _row(path: Path, number: int, line: str, needed: Sequence[str]) -> dict[str, Any]:
    try:
        row = json.loads(line)
        retention = [name for name in RETENTION if row.get(name) is not None]
        return {**row, "step": int(row["step"]), **{name: float(row[name]) for name in (*retention, *needed)}}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"a JSON object with a whole `step` and a number {' and '.join(f'`{name}`' for name in needed)} a line",
            f"{path.name}, line {number}: {error!r}",
            "mend the line or name the metric it holds",
        ) from error
