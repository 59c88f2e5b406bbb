"""The marginal gain of training, G = −ΔL/ΔFLOPs of the validation loss, with its uncertainty; and the over-fit test.

Both read the latest segment only: a new selection is a new curve. What the numbers are worth against the budget is a
policy's judgement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import ndtr

from stages.governor.state import Point, State
from stages.statistics.robust_fit import fit_line
from stages.statistics.theil_sen import theil_sen


@dataclass(frozen=True)
class Gain:
    """What a FLOP has bought lately.

    Args:
        rate: nats of validation loss gained per FLOP; positive while the loss falls.
        low, high: one-sided confidence bounds of `rate`, each at `confidence`; infinite where nothing is known.
        confidence: of each bound.
        points: evaluations fitted.
    """

    rate: float
    low: float
    high: float
    confidence: float
    points: int


def window_of(state: State, window: int) -> tuple[Point, ...]:
    """Return the latest `window` finite evaluations of the latest segment, with the checkpoint that it started from.

    The start stands at the FLOPs at which the segment began, unless the segment evaluated there itself.
    """
    inside = state.segment(state.last_segment)
    start = state.start(state.last_segment)
    if start is not None:
        begun = max((point.flops for point in state.points if point.segment < state.last_segment), default=0)
        if all(point.flops > begun for point in inside):
            moved = Point(start.step, begun, start.tokens, start.loss, start.se, start.phase, start.segment)
            inside = (moved, *inside)
    return inside[-window:]


def marginal_gain(state: State, window: int, confidence: float, *, robust: bool = False) -> Gain | None:
    """Return the marginal gain over the latest evaluations; None for fewer than two.

    G is minus the slope of validation loss on cumulative FLOPs: by weighted least squares (`fit_line`), or, where
    `robust`, the median of all pairwise slopes (`theil_sen`), which a few wild evaluations do not move.
    """
    points = window_of(state, window)
    if robust:
        found = theil_sen([p.flops for p in points], [p.loss or 0.0 for p in points], confidence)
        return None if found is None else Gain(-found[0], -found[2], -found[1], confidence, len(points))
    line = fit_line([p.flops for p in points], [p.loss or 0.0 for p in points], [p.se for p in points])
    if line is None:
        return None
    return Gain(-line.slope, -line.bound(confidence), -line.bound(1 - confidence), confidence, line.points)


@dataclass(frozen=True)
class Rise:
    """How far the loss has risen above its best: `age` evaluations since, `nats`, and the one-sided p-value."""

    age: int
    nats: float
    p_value: float

    def beyond(self, age: int, confidence: float) -> bool:
        """Return whether it is shown with `confidence`, at least `age` evaluations after the best."""
        return self.nats > 0 and self.age >= age and self.p_value < 1 - confidence


def rise_since_best(state: State) -> Rise | None:
    """Test whether the latest evaluation lies above the best one of the latest segment (or of its start).

    One-sided normal test of the difference with standard error √(se² + se_best²). Evaluations on the same items share
    most of their error, so the true error is smaller and the test errs towards going on. Without standard errors the
    p-value is 1: nothing is shown. None for fewer than two evaluations.
    """
    points = window_of(state, len(state.points) + 1)
    if len(points) < 2:
        return None
    at = min(range(len(points)), key=lambda i: points[i].loss or 0.0)
    best, last = points[at], points[-1]
    nats = float(last.loss or 0.0) - float(best.loss or 0.0)
    error = math.hypot(best.se or 0.0, last.se or 0.0)
    p_value = float(ndtr(-nats / error)) if error > 0 else 1.0
    return Rise(len(points) - 1 - at, nats, p_value)


@dataclass(frozen=True)
class NewData:
    """One more choice of data: `nats` expected of a segment on it, and the FLOPs of that segment and of choosing."""

    action: str
    nats: float
    flops: float

    @property
    def value(self) -> float:
        """Nats a FLOP over the horizon and its own cost."""
        return self.nats / self.flops

    @property
    def said(self) -> str:
        """What is expected, for people."""
        return f"a new {'selection' if self.action == 'reselect' else 'mixture'} should bring {self.nats:.4g} nats"


def best_new_data(
    state: State, horizon: float, left: float, freshness: float, least: float, allowed: frozenset[str]
) -> tuple[NewData | None, dict[str, float | int]]:
    """Return the allowed choice of new data with the highest value, of those that promise `least` nats, and the
    numbers of all that were weighed.

    Args:
        horizon: FLOPs of the segment to come.
        left: FLOPs that may be spent on choosing and training; what choosing leaves is what training gets.
        freshness: gain of the next as a share of the last, until two were seen.
    """
    found, numbers = list[NewData](), dict[str, float | int]()
    for action, cost in (("reselect", state.reselect_flops), ("remix", state.remix_flops)):
        if action not in allowed:
            continue
        seen = next_of(action, state, min(horizon, left - (cost or 0)), freshness)
        if seen is not None:
            found.append(seen)
            numbers |= {f"{action}_expected_nats": seen.nats, f"{action}_cost_flops": int(seen.flops)}
    return max((one for one in found if one.nats >= least), key=lambda one: one.value, default=None), numbers


def next_of(action: str, state: State, horizon: float, freshness: float) -> NewData | None:
    """Return what one more `reselect` or `remix` is expected to bring; None where none was seen in this run.

    The gain of the last one, times the ratio of the last two (at most 1), or `freshness` after only one; a shorter
    segment brings its share. A re-selection mixes too: until a remix was seen alone, re-selections speak for it.
    """
    told = action if action in state.actions else "reselect"
    seen = [
        (gain, state.segment_flops(i))
        for i, led in enumerate(state.actions)
        if led == told and (gain := state.segment_gain(i)) is not None
    ]
    if not seen or horizon <= 0:
        return None
    gain, flops = seen[-1]
    before = seen[-2][0] if len(seen) > 1 else None
    ratio = freshness if before is None or before <= 0 else min(1.0, max(0.0, gain / before))
    share = min(1.0, horizon / flops) if flops else 1.0
    own = state.reselect_flops if action == "reselect" else state.remix_flops
    return NewData(action, max(0.0, gain) * ratio * share, horizon + (own or 0))
