"""Strata of scores: intervals of equal width, or of equally many rows. Shapes: B rows."""

from __future__ import annotations

from typing import Literal

import numpy as np

from stages.coreset.turns import in_turns
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice


def stratum_of(score_B: np.ndarray, strata: int, cut: Literal["width", "quantile"]) -> np.ndarray:
    """Return the stratum of each row, int64, 0 the lowest; equal scores share one, some strata may be empty."""
    score_B = score_B.astype(np.float64)
    if cut == "width":
        low, high = score_B.min(), score_B.max()
        place_B = (score_B - low) / ((high - low) or 1.0) * strata
        return np.minimum(place_B.astype(np.int64), strata - 1)
    edges = np.quantile(score_B, np.arange(1, strata) / strata)
    return np.searchsorted(edges, score_B, side="right").astype(np.int64)


def named(score_B: np.ndarray, stratum_B: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return (group_B, names): strata numbered without gaps, each named by its lowest and highest score."""
    found, group_B = np.unique(stratum_B, return_inverse=True)
    low, high = np.full(len(found), np.inf), np.full(len(found), -np.inf)
    np.minimum.at(low, group_B, score_B)
    np.maximum.at(high, group_B, score_B)
    return group_B, tuple(f"{a:.4g} to {b:.4g}" for a, b in zip(low, high, strict=True))


def without_highest(score_B: np.ndarray, share: float) -> np.ndarray:
    """Return the positions without that share of the highest scores (rounded down), ascending; one is always left."""
    dropped = min(int(share * len(score_B)), len(score_B) - 1)
    return np.sort(np.argsort(-score_B, kind="stable")[dropped:])


def in_strata(
    rows: np.ndarray,
    group_B: np.ndarray,
    names: tuple[str, ...],
    weight_G: np.ndarray | None,
    pool: Candidates,
    quota: Quota,
    reason: str,
    *,
    dropped: bool,
) -> Choice:
    """Return `rows`, their strata in turns by weight; says so where it ends early because rows were `dropped`."""
    order = in_turns(group_B, weight_G)
    chosen = quota.fill(rows[order], pool.lengths_N)
    ended = dropped and len(chosen) == len(rows) and quota.wants_more(chosen, pool.lengths_N)
    return Choice(
        chosen,
        reason=reason,
        group=group_B[order[: len(chosen)]],
        groups=names,
        short="the others are among the highest scores, which `drop` leaves out" if ended else "",
    )
