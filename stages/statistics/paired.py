"""Paired comparisons of two models on the same items: estimate, standard error, BCa bootstrap interval.

Differences are of paired values, so what items share cancels. Items of one source are kept together where there are
enough sources. Sources: Miller 2024 (arXiv 2411.00640), sections 3 and 4, for clustered and paired errors; Cochran
1977, section 2.11, for the error of a ratio; Efron 1987 for BCa (scipy.stats.bootstrap).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

LEAST_CLUSTERS = 10
"""With fewer sources items are resampled: k sources have only C(2k−1, k) distinct resamples (126 for 5)."""
BATCH_NUMBERS = 4_000_000
"""Numbers that a bootstrap holds at once (memory, not result)."""


@dataclass(frozen=True)
class Comparison:
    """Two means and their difference.

    Args:
        before, after: the two models' means.
        difference: after − before.
        se: its standard error, clustered where `clusters` > 0.
        low, high: its BCa interval.
        items: pairs compared.
        clusters: sources kept together; 0 where items were taken as independent.
    """

    before: float
    after: float
    difference: float
    se: float
    low: float
    high: float
    items: int
    clusters: int


def clustered_se(residual_N: Floats, cluster_N: NDArray[np.int64] | None, weight_sum: float) -> float:
    """Return √(Σ_c (Σ_{i∈c} r_i)²) / Σw, the standard error of a (weighted) mean from its residuals.

    Without clusters each item is its own, and the sum is scaled by n/(n−1); with k clusters by k/(k−1).
    """
    sums = residual_N if cluster_N is None else np.bincount(cluster_N, weights=residual_N)
    count = len(sums)
    if count < 2:
        return math.inf
    return math.sqrt(count / (count - 1) * float(np.sum(np.square(sums)))) / weight_sum


def compare_ratios(
    before_N: Floats,
    after_N: Floats,
    weight_before_N: Floats,
    weight_after_N: Floats,
    sources: NDArray[np.str_],
    *,
    confidence: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> Comparison:
    """Compare Σafter/Σweight_after with Σbefore/Σweight_before over the same items.

    For token losses the values are sums of nats and the weights answer tokens; for plain means the weights are 1. With
    at least `LEAST_CLUSTERS` sources whole sources are resampled. The interval is BCa; where every resample gives the
    same difference it is that difference.

    Args:
        before_N, after_N, weight_before_N, weight_after_N, sources: one entry an item, in the same order.
        confidence: of the two-sided interval.
        resamples: bootstrap resamples.
        seed: of the bootstrap.
    """
    names, cluster_N = np.unique(sources, return_inverse=True)
    clusters = len(names) if len(names) >= LEAST_CLUSTERS else 0
    columns = [np.asarray(column, np.float64) for column in (before_N, after_N, weight_before_N, weight_after_N)]
    before, after = columns[0].sum() / columns[2].sum(), columns[1].sum() / columns[3].sum()
    residual_N = (columns[1] - after * columns[3]) / columns[3].sum() - (columns[0] - before * columns[2]) / columns[
        2
    ].sum()
    se = clustered_se(residual_N, cluster_N if clusters else None, 1.0)
    if clusters:
        columns = [np.bincount(cluster_N, weights=column).astype(np.float64) for column in columns]
    low, high = _bca(columns, float(after - before), confidence, resamples, seed)
    return Comparison(float(before), float(after), float(after - before), se, low, high, len(before_N), clusters)


def _ratio_difference(before: Floats, after: Floats, weight_before: Floats, weight_after: Floats, axis: int) -> Floats:
    result: Floats = after.sum(axis=axis) / weight_after.sum(axis=axis) - before.sum(axis=axis) / weight_before.sum(
        axis=axis
    )
    return result


def _bca(columns: list[Floats], difference: float, confidence: float, resamples: int, seed: int) -> tuple[float, float]:
    """Return the BCa interval of the difference of ratios, resampling positions."""
    if len(columns[0]) < 2:
        return -math.inf, math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # handled below
        warnings.simplefilter("ignore", RuntimeWarning)
        found = stats.bootstrap(
            columns,
            _ratio_difference,
            paired=True,
            vectorized=True,
            axis=-1,
            n_resamples=resamples,
            batch=max(1, BATCH_NUMBERS // (4 * len(columns[0]))),
            confidence_level=confidence,
            method="BCa",
            rng=np.random.default_rng(seed),
        )
    low, high = float(found.confidence_interval.low), float(found.confidence_interval.high)
    if math.isfinite(low) and math.isfinite(high):
        return low, high
    spread = np.asarray(found.bootstrap_distribution)
    tail = (1 - confidence) / 2 * 100
    percentiles = np.percentile(spread, [tail, 100 - tail])  # BCa is undefined: no spread, or none below the estimate
    return min(difference, float(percentiles[0])), max(difference, float(percentiles[1]))
