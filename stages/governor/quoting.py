"""What a run is expected to come to: loss, chance of a choice to pay, FLOPs, each with an 80 % interval. Pure.

The loss of a way of choosing goes on from its probe by L(x) = L_p − k·s·ln(x/x_p), x being FLOPs of training since the
run's start and one step more, so that the base model has its place. s is the slope of all evaluations since the base's
own: a probe alone is short beside what it is continued to. k, how much of that slope the rest of a run keeps, is
log-normal. Without a probe words tell: how surely a choice moves visits to rows of the target's kind, times how often
such choices were seen to end below chance. FLOPs end where the rest brings next to nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from scipy.optimize import brentq
from scipy.special import betaincinv, ndtr, ndtri

from data_contracts.cost import Budget, Price
from data_contracts.quotes import Span
from data_contracts.records import Likeness, Plan
from stages.governor.payback import WORTH_MOVING

TAIL = 0.1
"""Of each side of an interval: 80 % lie inside."""
_NORMAL = NormalDist()
Z = _NORMAL.inv_cdf(1 - TAIL)
KEPT, DOUBT = 0.6, 0.8
"""Median of k and the standard deviation of its logarithm. Settled on development runs of small models: fourteen that
saw each row once, continued from their first 8 to 20 of 144 steps, kept 0.50 to 0.54 of the slope as a median (80 %:
0.3 to 2), three planted cells, continued from 12 of 440 steps, 0.7 to 0.9."""
OF_THE_KIND, NOT_OF_THE_KIND = (27, 36), (8, 18)
"""(below chance, cells) of `benchmarks.selection_quality`: choices by words in planted pools, which move many visits
(0.15, 0.4 and 0.8 passes, seeds 500 to 502), and in pools split by task, which move few (0.5 and 1.5 passes, seeds 300
to 302)."""
STANDS = (25, 30)
"""(cells in which the order at a race's end was the order at the run's end, cells): 22 of 24 and 3 of 5 of
`benchmarks.selection_quality` (docs/selection.md), none of one development cell."""
_KEPT_I = KEPT * np.exp(DOUBT * ndtri((np.arange(199) + 0.5) / 199))
"""Equally likely values of k."""
SAME = 1e-9
"""Relative error below which a number is exact."""
_SIDE = _NORMAL.inv_cdf(0.95)
"""Half the interval of a likeness, in standard deviations: it is one of 90 %."""


@dataclass(frozen=True)
class Law:
    """How one way's loss goes on from its probe.

    Args:
        probe_loss, probe_se: nats at the probe's end, and their standard error.
        seen: x there.
        slope, slope_se: nats a factor e of x; a loss that rises counts as a slope of 0.
    """

    probe_loss: float
    probe_se: float
    seen: float
    slope: float
    slope_se: float

    def slopes(self) -> Span:
        """Return what the rest of the run keeps of the slope; never below 0."""
        found = _mixed(max(0.0, self.slope) * _KEPT_I, KEPT * self.slope_se)
        return Span(expected=max(0.0, found.expected), low=max(0.0, found.low), high=max(0.0, found.high))

    def loss(self, x: float) -> Span:
        """Return the loss at `x`; where that is less than was seen, the probe's."""
        fold = math.log(max(1.0, x / self.seen))
        error = math.hypot(self.probe_se, KEPT * self.slope_se * fold)
        return _mixed(self.probe_loss - max(0.0, self.slope) * fold * _KEPT_I, error)

    def enough(self, x: float, least_gain: float) -> Span:
        """Return from where on the rest of the way to `x` brings less than `least_gain` nats.

        The expected slope's, and those of the lower and upper end of its interval: a steeper one goes on for longer.
        """
        seen, slope = min(x, self.seen), self.slopes()
        expected, low, high = (
            max(seen, x * math.exp(-least_gain / each)) if each > 0 else seen
            for each in (slope.expected, slope.low, slope.high)
        )
        return Span(expected=expected, low=low, high=high)


def _mixed(points_I: np.ndarray, deviation: float) -> Span:
    """Return the median and the interval of equally likely points, each with a normal error of `deviation`."""
    if deviation <= SAME * float(np.abs(points_I).max()):
        low, expected, high = np.quantile(points_I, [TAIL, 0.5, 1 - TAIL])
        return Span(expected=float(expected), low=float(low), high=float(high))
    ends = (float(points_I.min()) - 4 * deviation, float(points_I.max()) + 4 * deviation)

    def at(share: float) -> float:
        return float(brentq(lambda value: float(ndtr((value - points_I) / deviation).mean()) - share, *ends))

    low, expected, high = sorted(at(share) for share in (TAIL, 0.5, 1 - TAIL))
    return Span(expected=expected, low=low, high=high)


def by_probes(probability: float, resamples: int) -> Span:
    """Return the probability that a choice ends below chance, told from a race.

    P·r + (1 − P)·(1 − r): P is the share of resamples, r how often what led at a race's end led at the run's end. The
    share is Φ(gain/error) and the gain off by one error, which makes the interval: that of documents drawn again. No
    resample is all that there are.
    """
    least = 0.5 / (resamples + 1)
    score = _NORMAL.inv_cdf(min(1 - least, max(least, probability)))
    stands = _jeffreys(*STANDS).expected
    expected, low, high = (
        share * stands + (1 - share) * (1 - stands)
        for share in (_NORMAL.cdf(score), _NORMAL.cdf(score - Z), _NORMAL.cdf(score + Z))
    )
    return Span(expected=expected, low=low, high=high)


def by_words(likeness: Likeness) -> Span:
    """Return the probability that a choice ends below chance, told from its words.

    m·p₁ + (1 − m)·p₀: m is how sure it is that the choice moves `WORTH_MOVING` of the visits (a normal number with the
    likeness's interval), p₁ and p₀ how often choices that do and that do not ended below chance (Jeffreys' intervals).
    """
    deviation = (likeness.high - likeness.low) / (2 * _SIDE)
    away = likeness.moved - WORTH_MOVING
    moves = _NORMAL.cdf(away / deviation) if deviation > 0 else float(away > 0)
    yes, no = _jeffreys(*OF_THE_KIND), _jeffreys(*NOT_OF_THE_KIND)
    return Span(
        **{name: moves * getattr(yes, name) + (1 - moves) * getattr(no, name) for name in ("expected", "low", "high")}
    )


def _jeffreys(won: int, of: int) -> Span:
    """Return how often something happens that happened `won` times of `of`, under Jeffreys' prior."""
    a, b = won + 0.5, of - won + 0.5
    return Span(expected=a / (a + b), low=float(betaincinv(a, b, TAIL)), high=float(betaincinv(a, b, 1 - TAIL)))


def modelled_limit(limits: Budget, price: Price | None, plan: Plan, evaluation_share: float) -> float:
    """Return the FLOPs that choosing and training may spend, before anything was timed: by the plan alone.

    Seconds are worth the FLOPs of training at the plan's modelled speed, money the seconds of training that `price`
    gives for it. Without a limit they are those of a pass over the pool, as a decision has it.
    """
    speed = plan.tokens_per_second * plan.flops_per_token
    hour = price.hour_of("train") if price else 0.0
    told = [
        limits.flops,
        None if limits.tokens is None else limits.tokens * plan.flops_per_token,
        None if limits.seconds is None else limits.seconds * speed,
        None if limits.money is None or not hour else limits.money / hour * 3600 * speed,
    ]
    known = [float(limit) for limit in told if limit is not None and 0 < limit < math.inf]
    return (1 - evaluation_share) * min(known) if known else float(plan.pass_flops)
