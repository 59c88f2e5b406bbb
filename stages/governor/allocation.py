"""How many FLOPs to give: to one run at a price, and to several runs that share a budget.

A run's loss is taken to fall as L(C) = E + a·C^−b, so its marginal gain G(C) = a·b·C^−(b+1) only falls. One run at a
price of λ nats a FLOP stops where G = λ. Several share a budget best where all that take something have the same G,
the price of the budget (water-filling; the Karush–Kuhn–Tucker conditions of a separable convex problem). Exact: a
root in one unknown. Where a and b come from is left to `law.py` and `curve_bank.py`. Shape: R runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from data_contracts.errors import InputError

LARGEST = 700.0
"""Logarithm from which a gain counts as infinite."""


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
class Shares:
    """What each run gets.

    Args:
        flops_R: more FLOPs for each run; they sum to the budget, or to less where every run is at its most.
        price: nats that one more FLOP of budget would buy; 0 where every run is at its most.
    """

    flops_R: np.ndarray
    price: float


def share(
    a_R: Sequence[float],
    b_R: Sequence[float],
    budget: float,
    *,
    spent_R: Sequence[float] | None = None,
    most_R: Sequence[float] | None = None,
) -> Shares:
    """Return the shares of `budget` that make the sum of all losses lowest.

    Args:
        a_R, b_R: of each run's law, above 0. A weight of a run's loss is a factor of its a.
        budget: FLOPs to share, above 0.
        spent_R: FLOPs that each run has had already; a run that is far along may get nothing. Default: 0.
        most_R: most FLOPs that each may get. Default: no limit.

    Raises `InputError` where a number is out of its range or the lists differ in length.
    """
    a, b = np.asarray(a_R, dtype=np.float64), np.asarray(b_R, dtype=np.float64)
    spent = np.zeros_like(a) if spent_R is None else np.asarray(spent_R, dtype=np.float64)
    most = np.full_like(a, np.inf) if most_R is None else np.asarray(most_R, dtype=np.float64)
    if not (len(a) and a.shape == b.shape == spent.shape == most.shape):
        raise InputError("one a, b, spent and most a run", f"{len(a)}, {len(b)}, {len(spent)}, {len(most)}", "fill up")
    if not ((a > 0).all() and (b > 0).all() and (spent >= 0).all() and (most >= 0).all() and budget > 0):
        raise InputError(
            "a, b and the budget above 0, spent and most not below", f"{a}, {b}, {budget}, {spent}, {most}", "fit again"
        )
    if most.sum() <= budget:
        return Shares(most, 0.0)
    log_ab = np.log(a * b)

    def wanted(log_price: float) -> np.ndarray:
        """FLOPs that each run takes at a price: up to where its marginal gain has fallen to it."""
        return np.clip(np.exp((log_ab - log_price) / (b + 1)) - spent, 0.0, most)

    # at `low` each run takes all it may of the whole budget, at `high` none takes more than an equal part of it
    low = float((log_ab - (b + 1) * np.log(spent + budget)).min())
    high = float((log_ab - (b + 1) * np.log(spent + budget / len(a))).max())
    root = (
        low if low == high else brentq(lambda x: float(wanted(x).sum()) - budget, low - 1e-9, high + 1e-9, xtol=1e-13)
    )
    flops = wanted(root)
    between = (flops > 0) & (flops < most)  # what rounding leaves of the budget goes to who is at neither bound
    flops[between] *= 1 + (budget - flops.sum()) / flops[between].sum() if between.any() else 1.0
    return Shares(np.minimum(flops, most), math.exp(root))
