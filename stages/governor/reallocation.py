"""Whether training should go on under a new plan: another batch, memory mode, technique, or number of workers.

A plan is owed where what it was made for has changed: the memory or the workers that may be used (a run that goes on
with others), or a segment in which memory ran out. Else it is an arm of the value rule (R3): the value of an action is
its expected gain over the horizon h per FLOP of the horizon and its own cost c, and a new plan whose gain a FLOP is r
times that of the one in force pays where r·h / (h + c) exceeds 1 + hysteresis. What r is, is told by the gradient
noise scale B* (McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11): B answer tokens a step bring 1 / (1 + B/B*) of what
as many would bring in the smallest steps. Which plan it becomes is for `plan` to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from data_contracts.records import MemoryUse, Plan
from stages.governor.window import window_for
from stages.stage import Artifact

USE = "memory.json"
"""Beside a curve: what the segment held."""


@dataclass(frozen=True)
class Reallocation:
    """A reason to plan anew.

    Args:
        reason: in words.
        speed_up: expected gain a FLOP under the new plan over that under the one in force; None: the plan is owed.
    """

    reason: str
    speed_up: float | None = None

    @property
    def owed(self) -> bool:
        """Whether the plan in force is none for what there is."""
        return self.speed_up is None

    def pays(self, horizon: float, cost: float, hysteresis: float) -> bool:
        """Return whether it is owed, or worth more than going on by `hysteresis` over `horizon` FLOPs, at `cost`."""
        if self.speed_up is None:
            return True
        return horizon > 0 and self.speed_up * horizon / (horizon + cost) > 1 + hysteresis


def token_efficiency(batch: float, noise: float) -> float:
    """Return what a token brings in steps of `batch` tokens, of what it brings in the smallest: 1 / (1 + B/B*)."""
    return 1 / (1 + batch / noise)


def changed(plan: Plan, *, workers: int, limit: int | None) -> Reallocation | None:
    """Return what has changed since `plan` was made; None where it was made for the same.

    Args:
        plan: in force.
        workers: that may be used now.
        limit: memory of one worker that may be used now, bytes; None is unlimited.
    """
    found = []
    if workers != plan.workers:
        found.append(f"{workers} worker(s) may be used, not {plan.workers}")
    if limit != plan.limit_bytes:
        now, before = ("any memory" if each is None else f"{each:,} bytes" for each in (limit, plan.limit_bytes))
        found.append(f"{now} may be held, not {before}")
    return Reallocation(" and ".join(found)) if found else None


def uses_of(curves: Iterable[Artifact]) -> list[MemoryUse]:
    """Return what the segments of these curves held; a file that cannot be read says nothing, since it is no part of a
    digest and only advises."""
    found = []
    for place in (curve.measured(USE) for curve in curves):
        with suppress(FileNotFoundError, ValueError):
            found.append(MemoryUse.model_validate_json(place.read_bytes()))
    return found


def ran_out(use: MemoryUse | None) -> Reallocation | None:
    """Return that memory ran out in the latest segment; None where it did not, or nothing is known."""
    if use is None or not use.ran_out:
        return None
    return Reallocation("memory ran out in the latest segment, whose steps went on in smaller micro-batches")


def other_batch(plan: Plan, curves: Sequence[pa.Table]) -> Reallocation | None:
    """Return what another window would bring, told from the latest gradient noise; None where it stays as it is."""
    if plan.window is None or plan.answer_tokens is None:
        return None
    window, noise = window_for(plan.window, curves, plan.answer_tokens)
    now = plan.micro_batch * plan.accumulation * max(1, plan.workers)
    if noise is None or window == now:
        return None
    before, after = (token_efficiency(rows * plan.answer_tokens, noise) for rows in (now, window))
    reason = f"the gradient noise scale is {noise:.3g} answer tokens: {window} examples a step instead of {now}"
    return Reallocation(reason, after / before)
