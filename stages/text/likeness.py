"""Likeness: how many rows are of the target's kind, told from their words alone; no model, nothing trained.

A row's nearness is its largest cosine with a reference row (hashed words and word pairs, tf–idf); a reference row's own
is to the other reference rows. Half of all rows of the reference's kind are as near as the median m of those, so

    share of the kind = min(1, 2 · share of rows with nearness ≥ m).

The reference must be rows that had no part in choosing (validation): chosen rows are near to what they were chosen by.
It sees words, not meaning, and a form that the whole reference shares belongs to its kind. What follows from the shares
is left to others. Shapes: R reference rows, C chosen, P of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_contracts.records import Likeness
from stages.text.hashed import hashed_rows

LEAST_ROWS = 8
"""Distinct rows with words, of the reference, the chosen and the pool, from which something is told."""
MOST_ROWS = 2000
"""Of each that need to be looked at: more changes a share by less than a hundredth."""
COPY = 0.95
"""Cosine from which a reference row repeats another: nearer to its copy than rows of the kind are, it would say that no
other row is of the kind. Rows of one task that share its instruction are at 0.2 to 0.86."""
RESAMPLES = 1000
INTERVAL = (0.05, 0.95)
"""Quantiles of the interval: each side is wrong once in twenty."""
SAME = 1e-9
"""Of a cosine: what rounding does."""


def likeness(
    reference: Sequence[str], chosen: Sequence[str], pool: Sequence[str], rng: np.random.Generator
) -> Likeness | None:
    """Return the shares of the chosen rows and of the pool that are of the reference's kind, and their difference.

    Args:
        reference: texts of the kind that had no part in choosing; equal and nearly equal ones (`COPY`) count once.
        chosen: texts of chosen rows, or of some by chance.
        pool: texts of rows of the pool by chance.
        rng: of the resamples: reference, chosen and pool rows are drawn again.

    None where it cannot be told: fewer than `LEAST_ROWS` of either hold words, or reference rows share no word (a
    script without spaces).
    """
    kinds = [[text for text in texts if text.strip()] for texts in (dict.fromkeys(reference), chosen, pool)]
    ends = np.cumsum([len(texts) for texts in kinds])
    rows_MB = hashed_rows([text for texts in kinds for text in texts])
    with_words_M = np.diff(rows_MB.indptr) > 0
    reference_RB, chosen_CB, pool_PB = (
        rows_MB[low:high][with_words_M[low:high]] for low, high in zip([0, *ends[:2]], ends, strict=True)
    )
    own_RR = (reference_RB @ reference_RB.T).toarray()
    once_R = np.ones(len(own_RR), dtype=bool)
    for row in range(len(own_RR)):
        if once_R[row]:
            once_R[row + 1 :] &= own_RR[row, row + 1 :] < COPY
    reference_RB, own_RR = reference_RB[once_R], own_RR[np.ix_(once_R, once_R)]
    if min(reference_RB.shape[0], chosen_CB.shape[0], pool_PB.shape[0]) < LEAST_ROWS:
        return None
    np.fill_diagonal(own_RR, 0.0)
    own_R = own_RR.max(axis=1)
    near_C, near_P = ((rows @ reference_RB.T).toarray().max(axis=1) for rows in (chosen_CB, pool_PB))
    if np.median(own_R) <= 0:
        return None
    draws_S3 = np.empty((RESAMPLES, 3))
    for draw in range(RESAMPLES):
        again = [near[rng.integers(len(near), size=len(near))] for near in (own_R, near_C, near_P)]
        draws_S3[draw] = _shares(*again)
    taken, there, moved = _shares(own_R, near_C, near_P)
    low, high = np.quantile(draws_S3[:, 2], INTERVAL)
    return Likeness(chosen=taken, pool=there, moved=moved, low=float(low), high=float(high), reference_rows=len(own_R))


def _shares(own_R: np.ndarray, near_C: np.ndarray, near_P: np.ndarray) -> tuple[float, float, float]:
    """Return the share of the kind among the chosen, in the pool, and the difference."""
    middle = float(np.median(own_R)) - SAME
    chosen, pool = (min(1.0, 2 * float((near >= middle).mean())) for near in (near_C, near_P))
    return chosen, pool, chosen - pool
