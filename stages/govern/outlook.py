"""What a run has shown so far and what its rest is expected to bring, in numbers: for people, no decision reads it.

The latest segment's curve is continued by the bank of shapes (`stages/governor/curve_bank.py`), whatever the policy;
the marginal gain is that of the latest five evaluations, as each of them was seen. Shapes: G points of a drawn curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from data_contracts.ledger import Ledger
from data_contracts.records import Decision, Table
from stages.governor.curve_bank import FittedCurve, fit_curve
from stages.governor.gain import marginal_gain, window_of
from stages.governor.policy import finite
from stages.governor.state import State

WINDOW, CONFIDENCE, LEVEL, DRAWN = 5, 0.9, 0.8, 60
AHEAD = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of what is left at which the fitted curve is told in numbers."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Band:
    """The fitted curve: FLOPs of the run's training, and loss with its 80 % interval, in the metric's own sense."""

    flops_G: np.ndarray
    middle_G: np.ndarray
    low_G: np.ndarray
    high_G: np.ndarray


@dataclass(frozen=True)
class Outlook:
    """Args: `fitted` continues the latest segment, None for too few evaluations; `left` FLOPs may still be spent."""

    state: State
    fitted: FittedCurve | None
    left: int | None

    @classmethod
    def of(cls, state: State, left: int | None) -> Outlook:
        """Continue the curve of the latest segment; the draws are always the same."""
        points = window_of(state, len(state.points) + 1)
        flops, losses = [float(point.flops) for point in points], [point.loss or 0.0 for point in points]
        return cls(state, fit_curve(flops, losses, np.random.default_rng(0)) if points else None, left)

    def band(self) -> Band | None:
        """Return the curve from the segment's first evaluation to the end of what may be spent."""
        if self.fitted is None:
            return None
        first = next(point.flops for point in window_of(self.state, len(self.state.points) + 1) if point.flops > 0)
        return self.at(np.geomspace(first, self.state.flops + (self.left or 0), DRAWN))

    def at(self, flops_G: np.ndarray) -> Band | None:
        """Return the curve at some FLOPs of training; None for too few evaluations."""
        if self.fitted is None:
            return None
        loss_GB = np.stack([self.fitted.loss(flops) for flops in flops_G])
        sign = 1.0 if self.state.direction == "minimise" else -1.0
        low, middle, high = np.quantile(loss_GB, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2], axis=1) * sign
        return Band(flops_G, middle, np.minimum(low, high), np.maximum(low, high))

    def buys(self, flops: int | None) -> tuple[float, float, float] | None:
        """Return (median, low, high) of what so many FLOPs more on the same data take off the loss; None: unknown."""
        if self.fitted is None or not flops:
            return None
        return self.fitted.gain(self.state.flops, self.state.flops + flops, LEVEL)

    def gains(self) -> list[tuple[int, float, float, float]]:
        """Return (FLOPs, nats a FLOP, its lower and upper bound) as seen at each evaluation that tells them."""
        found = []
        for place, point in enumerate(self.state.points, start=1):
            gain = marginal_gain(replace(self.state, points=self.state.points[:place]), WINDOW, CONFIDENCE)
            if point.finite and gain is not None and np.isfinite([gain.rate, gain.low, gain.high]).all():
                found.append((point.flops, gain.rate, gain.low, gain.high))
        return found


def ahead(outlook: Outlook) -> Table:
    """Return the fitted curve with its band, from now to the end of what may be spent; no row where there is none."""
    band = outlook.at(np.unique([outlook.state.flops + share * (outlook.left or 0) for share in AHEAD]))
    told = () if band is None else (band.flops_G, band.middle_G, band.low_G, band.high_G)
    rows = tuple((int(flops), *losses) for flops, *losses in zip(*(column.tolist() for column in told), strict=True))
    return Table(title="Fitted curve", columns=("FLOPs of training", "loss", "low 80 %", "high 80 %"), rows=rows)


def marginal(outlook: Outlook) -> Table:
    """Return the marginal gain as each evaluation showed it."""
    columns = ("FLOPs of training", "nats a FLOP", "low 90 %", "high 90 %")
    return Table(title="Marginal gain", columns=columns, rows=tuple(outlook.gains()))


def expected(outlook: Outlook, decision: Decision) -> Table:
    """Return what can be bought with what is left, as far as it can be told."""
    rows: list[tuple[str, int | None, float | None, float | None, float | None]] = []
    for what, flops in (("the next segment", decision.segment_flops), ("all that is left", outlook.left)):
        if flops is not None:
            rows.append((f"{what}, on the same data", flops, *(outlook.buys(flops) or (None, None, None))))
    anew, cost = decision.numbers.get("reselect_expected_nats"), decision.numbers.get("reselect_cost_flops")
    if isinstance(anew, float) and isinstance(cost, int):
        rows.append(("a segment on a new selection", cost, anew, None, None))
    return Table(
        title="What the rest is expected to buy",
        columns=("with", "FLOPs", "nats", "low 80 %", "high 80 %"),
        rows=tuple(rows),
    )


@dataclass(frozen=True)
class Mark:
    """A decision where it was made: after a segment, or at a step inside one; `loss` in the metric's own sense."""

    segment: int
    step: int
    flops: int
    loss: float | None
    inside: bool
    action: str
    reason: str


def marks(decision: Decision, state: State, inside: Sequence[tuple[int, str, str]]) -> list[Mark]:
    """Return every decision of the run in the order in which they were made.

    Args:
        decision: the latest; it carries the earlier ones between segments.
        inside: (step, action, reason) of each choice made in training; those that went on are left out.
    """
    chosen, numbers = {step: why for step, *why in inside if why[0] != "continue"}, decision.numbers
    found = []
    for segment in range(state.last_segment + 1):
        points = [point for point in state.points if point.segment == segment]
        told = {
            True: [point for point in points if point.loss is not None and point.step in chosen],
            False: points[-1:],
        }
        for within, point in ((within, point) for within, some in told.items() for point in some):
            if within:
                action, reason = chosen[point.step]
            elif segment == decision.round:
                action, reason = decision.action, decision.reason
            else:
                action, reason = (
                    str(numbers.get(f"segment_{segment + 1}_{part}", "")) for part in ("action", "reason")
                )
            loss = state.shown(point.loss) if point.finite else None
            found.append(Mark(segment, point.step, point.flops, loss, within, action, reason))
    return found


def decisions(made: Sequence[Mark]) -> Table:
    """Return the decisions as a table."""
    rows = tuple(
        (
            f"{'in' if mark.inside else 'after'} segment {mark.segment}, step {mark.step}",
            mark.loss,
            mark.action,
            mark.reason,
        )
        for mark in made
    )
    return Table(title="Decisions", columns=("where", "loss", "action", "why"), rows=rows)


def by_cause(spent: Ledger) -> Table:
    """Return the FLOPs and tokens that each cause took, dearest first."""
    total = max(1, spent.total.flops)
    causes = sorted(spent.by_cause().items(), key=lambda item: (-item[1].flops, item[0]))
    rows = tuple((cause, cost.flops, round(cost.flops / total, 4), cost.tokens) for cause, cost in causes)
    return Table(title="FLOPs by cause", columns=("cause", "FLOPs", "share", "tokens"), rows=rows)


def segments(state: State) -> Table:
    """Return one row a segment: what led to it, what it spent, where its loss began and what it gained."""
    rows = []
    for index in range(state.last_segment + 1):
        inside, start = state.segment(index), state.start(index)
        lowest = min((point.loss or 0.0 for point in inside), default=None)
        ends = (state.shown(start.loss if start else None), state.shown(lowest), state.segment_gain(index))
        rows.append((index, state.actions[index], state.segment_flops(index), *ends, course(state, index)))
    columns = ("segment", "action", "FLOPs", "loss at its start", "lowest loss", "gain (nats)", "course")
    if state.retention is None:
        return Table(title="Segments", columns=columns, rows=tuple(rows))
    return Table(
        title="Segments",
        columns=(*columns, "retention at its end"),
        rows=tuple((*row, _retention(state, row[0])) for row in rows),
    )


def _retention(state: State, segment: int) -> float | None:
    """Return the latest retention loss of a segment."""
    seen = [point.retention for point in state.points if point.segment == segment and point.retention is not None]
    return finite(seen[-1]) if seen else None


def forgetting(state: State) -> dict[str, str | float | None]:
    """Return in facts where the retention loss began, where it is, and how far it may rise; nothing where none is
    watched."""
    point = state.retained
    if state.retention is None or point is None:
        return {}
    rise, error = state.rise(point) or (math.nan, math.nan)
    allowed = state.retention.allowed
    return {
        "retention loss at the start": finite(state.retention.loss),
        "retention loss now": f"{point.retention:.4f}, risen by {rise:.4f} (standard error {error:.2g})",
        "it may rise by": "any: `govern.most_forgotten_nats` is unset" if allowed is None else allowed,
    }


def course(state: State, segment: int) -> str:
    """Return a segment's evaluations as a line of bars, the highest and lowest loss of the run being its ends."""
    every = [point.loss or 0.0 for point in state.evaluations]
    low, span = min(every, default=0.0), (max(every) - min(every)) or 1.0 if every else 1.0
    return "".join(
        BARS[min(len(BARS) - 1, int(((point.loss or 0.0) - low) / span * len(BARS)))]
        for point in state.segment(segment)
    )
