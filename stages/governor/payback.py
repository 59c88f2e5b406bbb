"""Whether a way of choosing pays: what it costs, what its choice taught, and what is left to train with.

Each way ("arm") was tried by a short training of equal FLOPs from one start. From there the loss of arm a is taken to
fall as L_a(C) = L_a(C_p) - s·ln(C/C_p), with one slope s for all, seen in the probes: what an arm gained in its probe
it keeps, and what it pays for choosing is training it does without, s·ln(C/(C - price)) nats. (The exponential law of
compute-constrained data selection, Yin & Rush 2025, arXiv 2410.16208, has a floor that short probes put at the last
loss seen, whatever comes later.) Pure: numbers in, numbers out. Shapes: A arms, P evaluations, D documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_contracts.config import ArmConfig
from data_contracts.records import Likeness, Plan

RESAMPLES = 2000
INTERVAL = (0.1, 0.9)
"""Quantiles of the interval that is told with each expected loss: 80 %."""
WORTH_CHOOSING = 0.1
"""Of a pool: the share that is taken to be like the target where nothing else is known."""
WORTH_MOVING = 0.2
"""Of all visits: so many must go to rows of the target's kind instead of others for a choice to be used untried. Set
between development pools that hold rows of the kind (0.38 and above) and pools split by task (0.12 and below)."""


@dataclass(frozen=True)
class Probe:
    """What trying one arm showed.

    Args:
        name: of the arm.
        flops_P, loss_P: training FLOPs since the common start and the validation loss there, nats, oldest first.
        sums_D: nats over the answer tokens of each validation document, at the end of the probe.
        price: FLOPs that choosing this way from the whole pool costs from here on.
    """

    name: str
    flops_P: np.ndarray
    loss_P: np.ndarray
    sums_D: np.ndarray
    price: int


@dataclass(frozen=True)
class Forecast:
    """What an arm is expected to reach.

    Attributes:
        loss, low, high: expected validation loss at the end of the budget and its 80 % interval, nats.
        gain, gain_low, gain_high: loss of the first arm less this one's at the end of the budget; its 80 % interval.
        probability: share of resamples in which it ends below the first arm.
        training_flops: what it trains with in all, its probe included.
        reuses: of one choice, until it has paid for itself against the first arm; None where never.
    """

    name: str
    loss: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float
    probability: float
    training_flops: int
    reuses: float | None


def fit_slope(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Return (s, its standard error): nats a factor e of FLOPs, by least squares with an intercept for each curve.

    Args:
        curves: (flops_P, loss_P) an arm, FLOPs above 0.

    Curves of one point say nothing; without any two points both numbers are 0.
    """
    x_A = [np.log(flops_P) - np.log(flops_P).mean() for flops_P, _ in curves]
    y_A = [loss_P - loss_P.mean() for _, loss_P in curves]
    x, y = np.concatenate(x_A), np.concatenate(y_A)
    spread = float(x @ x)
    if spread == 0.0:
        return 0.0, 0.0
    slope = -float(x @ y) / spread
    free = len(x) - len(curves) - 1
    noise = float(np.square(y + slope * x).sum()) / free if free > 0 else 0.0
    return slope, math.sqrt(noise / spread)


def forecasts(
    tokens_D: np.ndarray, probes: Sequence[Probe], spendable: int, rng: np.random.Generator
) -> tuple[Forecast, ...]:
    """Return what each arm is expected to reach with `spendable` FLOPs, the first arm being what they are held against.

    Args:
        tokens_D: answer tokens of each validation document.
        probes: one an arm; the first is the arm to beat, chance as a rule.
        spendable: FLOPs that choosing and training may still spend; an arm's probe is part of its training.
        rng: of the resamples.

    Documents are resampled together for all arms, so what is common to them cancels. A loss that rises with FLOPs
    counts as a slope of 0: nothing is gained by training longer.
    """
    length_A = np.array([float(probe.flops_P[-1]) for probe in probes])
    left_A = np.array([max(0, spendable - probe.price) for probe in probes], dtype=np.float64) + length_A
    fold_A = np.log(left_A / length_A)
    slope, error = fit_slope([(probe.flops_P, probe.loss_P) for probe in probes])
    sums_AD = np.stack([probe.sums_D for probe in probes])
    draws_RA = np.empty((RESAMPLES, len(probes)))
    for resample in range(RESAMPLES):
        rows = rng.integers(len(tokens_D), size=len(tokens_D))
        drawn = max(0.0, rng.normal(slope, error))
        draws_RA[resample] = sums_AD[:, rows].sum(1) / tokens_D[rows].sum() - drawn * fold_A
    end_A = sums_AD.sum(1) / tokens_D.sum()
    loss_A = end_A - max(0.0, slope) * fold_A
    low_A, high_A = np.quantile(draws_RA, INTERVAL, axis=0)
    least_A, most_A = np.quantile(draws_RA[:, :1] - draws_RA, INTERVAL, axis=0)
    return tuple(
        Forecast(
            probe.name,
            loss=float(loss_A[arm]),
            low=float(low_A[arm]),
            high=float(high_A[arm]),
            gain=float(loss_A[0] - loss_A[arm]),
            gain_low=float(least_A[arm]),
            gain_high=float(most_A[arm]),
            probability=float((draws_RA[:, arm] < draws_RA[:, 0]).mean()) if arm else 0.0,
            training_flops=int(left_A[arm]),
            reuses=break_even(float(end_A[0] - end_A[arm]), slope, float(left_A[0]), probe.price),
        )
        for arm, probe in enumerate(probes)
    )


def break_even(gained: float, slope: float, flops: float, price: int) -> float | None:
    """Return R*, how often a choice must be used before it has paid: price / FLOPs saved a use. None: never.

    Args:
        gained: nats by which the arm ended below the first at equal FLOPs.
        slope: of the law, nats a factor e.
        flops: that the first arm trains with; what it reaches, the other reaches with flops·exp(-gained/slope).
        price: of choosing once, FLOPs. 0 pays at once.
    """
    if price == 0:
        return 0.0
    if gained <= 0:
        return None
    return price / (flops * (1.0 if slope <= 0 else -math.expm1(-gained / slope)))


def expected_price(arm: ArmConfig, plan: Plan) -> float:
    """Return the FLOPs that choosing this way from the whole pool is expected to cost, before it was tried.

    `arm.passes` trainings on each row that its filters let through.
    """
    share = arm.passes
    for settings in arm.coverage.get("filters", ()):
        share *= float(settings.get("keep", 1.0))
    return share * plan.pass_flops


def worth(price: float, spendable: float, uses: int = 1) -> float | None:
    """Return how many times as long chance must train to be equal to a choice that just pays; None where none pays.

    B / (B - price/uses): true whatever the slope, so it can be told before anything is tried.
    """
    left = spendable - price / uses
    return None if left <= 0 else spendable / left


def moves_enough(likeness: Likeness | None) -> bool | None:
    """Return whether a choice surely moves (True) or surely does not move (False) `WORTH_MOVING` of all visits.

    None: the interval holds it, or nothing was told. Then only a trial tells.
    """
    if likeness is None or likeness.low <= WORTH_MOVING <= likeness.high:
        return None
    return likeness.low > WORTH_MOVING


def pick(arms: Sequence[Forecast], confidence: float) -> Forecast:
    """Return the arm with the lowest expected loss of those that beat the first with `confidence`; else the first."""
    better = [arm for arm in arms[1:] if arm.probability >= confidence and arm.gain > 0]
    return min(better, key=lambda arm: arm.loss, default=arms[0])


def budget_fraction(spendable: float, pass_flops: float, epochs: float, kind: float = WORTH_CHOOSING) -> float:
    """Return how many visits a pass over the choice makes, as a share of the pool's rows.

    Up to four epochs teach nearly what fresh rows do (Muennighoff et al. 2023, arXiv 2305.16264), but fresh rows never
    teach less. Where the budget does not visit the rows of the target's `kind` once, it visits as many as it can; where
    it does not visit them more than `epochs` times, them alone. What it has beyond that goes to further rows, and those
    of the kind are a core (`has_core`); where the kind is so much of the pool that there is no room for others, to so
    much of the pool as it visits `epochs` times.
    """
    passes = spendable / pass_flops
    if passes <= kind * epochs:
        return min(passes, kind)
    return min(1.0, passes if kind * epochs < 1.0 else passes / epochs)


def kind_of(arm: ArmConfig) -> float:
    """Return the share of the pool that is taken to be of the target's kind for an arm."""
    return arm.kind or WORTH_CHOOSING


def visited_share(arm: ArmConfig, left: float, pass_flops: float) -> float:
    """Return what an arm takes with `left` FLOPs for training: its own fraction, or that of the budget."""
    return arm.fraction or budget_fraction(left, pass_flops, arm.epochs, kind_of(arm))


def has_core(fraction: float, epochs: float, kind: float) -> bool:
    """Return whether of a choice with `fraction` the share `kind` is a core, visited `epochs` times, others once."""
    return epochs > 1.0 and fraction > kind * epochs
