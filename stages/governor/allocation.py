"""How many FLOPs to give: to one run at a price, and to several runs that share a budget.

A run's loss is taken to fall as L(C) = E + a·C^−b, so its marginal gain G(C) = a·b·C^−(b+1) only falls. One run at a
price of λ nats a FLOP stops where G = λ. Several share a budget best where all that take something have the same G,
the price of the budget (water-filling; the Karush–Kuhn–Tucker conditions of a separable convex problem). Exact: a
root in one unknown. A run's law may be many draws of (a, b), as a bootstrap gives them: G is then their mean, which
only falls too, and the expected loss is lowest. Where a and b come from is left to `curve_bank.py`. Shapes: R runs, B
draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp

from data_contracts.errors import InputError

LARGEST = 700.0
"""Logarithm from which a gain counts as infinite."""
SAME = 1e-9
"""Difference of logarithms below which the draws of a law are one."""

Draws = float | np.ndarray


def marginal(a: float, b: float, flops: float) -> float:
    """Return G = a·b·C^−(b+1), nats a FLOP; infinite at 0."""
    log_gain = math.inf if flops == 0 else math.log(a * b) - (b + 1) * math.log(flops)
    return math.inf if log_gain > LARGEST else math.exp(log_gain)


def cheapest(a: float, b: float, price: float) -> float:
    """Return C* = (a·b/λ)^(1/(b+1)), where L(C) + λ·C is lowest.

    Args:
        a, b: of the law, above 0.
        price: λ, nats a FLOP, above 0.
    """
    return math.exp((math.log(a * b) - math.log(price)) / (b + 1))


@dataclass(frozen=True)
class Falling:
    """The marginal gain of one run, from draws of its law; those of a flat curve (a = 0) gain nothing.

    Args:
        log_ab_B, power_B: ln(a·b) and b + 1 of the draws that fall.
        log_part: ln of their share of all draws.
    """

    log_ab_B: np.ndarray
    power_B: np.ndarray
    log_part: float

    @classmethod
    def of(cls, a: Draws, b: Draws) -> Falling:
        """Return the gain of a law or of draws of it. Raises `InputError` where none falls, or one is out of range."""
        a_B, b_B = np.broadcast_arrays(np.atleast_1d(np.asarray(a, float)), np.atleast_1d(np.asarray(b, float)))
        if not ((a_B >= 0).all() and (a_B > 0).any() and (b_B > 0).all()):
            raise InputError("a and b above 0", f"{a}, {b}", "fit again")
        falls_B = a_B > 0
        log_ab_B = np.log(a_B[falls_B]) + np.log(b_B[falls_B])
        return cls(log_ab_B, b_B[falls_B] + 1, math.log(falls_B.mean()))

    def log_gain(self, log_flops: float) -> float:
        """Return ln G at ln C."""
        log_B = self.log_ab_B - self.power_B * log_flops
        return self.log_part + float(logsumexp(log_B)) - math.log(len(log_B))

    def log_flops(self, log_price: float) -> float:
        """Return ln C where ln G has fallen to `log_price`: between the places where each draw's alone has."""
        each_B = (self.log_ab_B + self.log_part - log_price) / self.power_B
        low, high = float(each_B.min()), float(each_B.max())
        if high - low < SAME:
            return low
        return float(brentq(lambda x: self.log_gain(x) - log_price, low - SAME, high + SAME, xtol=1e-13))


@dataclass(frozen=True)
class Shares:
    """What each run gets.

    Args:
        flops_R: more FLOPs for each run; they sum to the budget, or to less where every run is at its most.
        price: nats that one more FLOP of budget would buy; 0 where every run is at its most.
    """

    flops_R: np.ndarray
    price: float


def share(
    a_R: Sequence[Draws],
    b_R: Sequence[Draws],
    budget: float,
    *,
    spent_R: Sequence[float] | None = None,
    most_R: Sequence[float] | None = None,
) -> Shares:
    """Return the shares of `budget` that make the sum of all losses lowest.

    Args:
        a_R, b_R: of each run's law, above 0, or draws of it, (B,) each. A weight of a run's loss is a factor of its a.
        budget: FLOPs to share, above 0.
        spent_R: FLOPs that each run has had already; a run that is far along may get nothing. Default: 0.
        most_R: most FLOPs that each may get. Default: no limit.

    Raises `InputError` where a number is out of its range or the lists differ in length.
    """
    spent = np.zeros(len(a_R)) if spent_R is None else np.asarray(spent_R, dtype=np.float64)
    most = np.full(len(a_R), np.inf) if most_R is None else np.asarray(most_R, dtype=np.float64)
    if not (len(a_R) and len(a_R) == len(b_R) == len(spent) == len(most)):
        counts = f"{len(a_R)}, {len(b_R)}, {len(spent)}, {len(most)}"
        raise InputError("one a, b, spent and most a run", counts, "fill up")
    if not ((spent >= 0).all() and (most >= 0).all() and budget > 0):
        raise InputError("a budget above 0, spent and most not below", f"{budget}, {spent}, {most}", "fit again")
    laws = [Falling.of(a, b) for a, b in zip(a_R, b_R, strict=True)]
    if most.sum() <= budget:
        return Shares(most, 0.0)

    def wanted(log_price: float) -> np.ndarray:
        """FLOPs that each run takes at a price: up to where its marginal gain has fallen to it."""
        log_R = np.array([law.log_flops(log_price) for law in laws])
        return np.clip(np.exp(np.minimum(log_R, LARGEST)) - spent, 0.0, most)

    # at `low` each run takes all it may of the whole budget, at `high` none takes more than an equal part of it
    low = min(law.log_gain(x) for law, x in zip(laws, np.log(spent + budget), strict=True))
    high = max(law.log_gain(x) for law, x in zip(laws, np.log(spent + budget / len(laws)), strict=True))
    root = (
        low if low == high else brentq(lambda x: float(wanted(x).sum()) - budget, low - 1e-9, high + 1e-9, xtol=1e-13)
    )
    flops = wanted(root)
    between = (flops > 0) & (flops < most)  # what rounding leaves of the budget goes to who is at neither bound
    flops[between] *= 1 + (budget - flops.sum()) / flops[between].sum() if between.any() else 1.0
    return Shares(np.minimum(flops, most), math.exp(root))
