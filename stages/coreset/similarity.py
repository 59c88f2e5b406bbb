"""How alike examples are: cosines of their features, as a dense matrix for few rows and as nearest neighbours for many.

Cosines below zero count as zero: unlike is not worse than unrelated. A row of zeros has similarity zero to all, itself
included. Nothing of size n² is held for the sparse form. Imports no torch. Shapes: n rows, K numbers a row, m
neighbours.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix, diags

from stages.meter.products import note, product

DENSE_BYTES = 512 * 2**20
"""Memory that a dense matrix may take; above it (11,585 rows) similarities are sparse."""
BLOCK_ROWS = 1024


def unit_rows(feature_nK: np.ndarray) -> np.ndarray:
    """Return each row at length one, float32; a row of zeros stays so. Raises `ValueError` where one is not finite."""
    feature_nK = np.asarray(feature_nK, dtype=np.float64)
    if not np.isfinite(feature_nK).all():
        raise ValueError("a feature is not finite")
    largest_n1 = np.abs(feature_nK).max(axis=1, keepdims=True, initial=0.0)
    scaled_nK = np.divide(feature_nK, largest_n1, out=np.zeros_like(feature_nK), where=largest_n1 > 0)
    norm_n1 = np.linalg.norm(scaled_nK, axis=1, keepdims=True)
    return np.divide(scaled_nK, norm_n1, out=np.zeros_like(scaled_nK), where=norm_n1 > 0).astype(np.float32)


def dense_cosine(unit_nK: np.ndarray) -> np.ndarray:
    """Return max(0, cosine) of every pair, (n, n) float32."""
    similarity_nn: np.ndarray = product(unit_nK, unit_nK.T)
    np.maximum(similarity_nn, 0.0, out=similarity_nn)
    present_n = (unit_nK != 0).any(axis=1)
    np.fill_diagonal(similarity_nn, present_n.astype(np.float32))
    return similarity_nn


def nearest_cosine(unit_nK: np.ndarray, neighbours: int) -> csr_matrix:
    """Return max(0, cosine) of each row to its `neighbours` nearest rows, and to those it is near to; (n, n) sparse.

    The nearest are exact (faiss, inner product). Symmetric, the diagonal is 1 (0 for a row of zeros); memory is that of
    at most 2·n·neighbours numbers.
    """
    import faiss

    count = len(unit_nK)
    index = faiss.IndexFlatIP(unit_nK.shape[1])
    index.add(unit_nK)
    wanted = min(neighbours, count)
    near_nm = np.empty((count, wanted), dtype=np.int32)
    value_nm = np.empty((count, wanted), dtype=np.float32)
    for start in range(0, count, BLOCK_ROWS):
        value_bm, near_bm = index.search(unit_nK[start : start + BLOCK_ROWS], wanted)
        value_nm[start : start + BLOCK_ROWS], near_nm[start : start + BLOCK_ROWS] = value_bm, near_bm
    np.clip(value_nm, 0.0, 1.0, out=value_nm)
    note(2 * count * count * unit_nK.shape[1])
    starts = np.arange(0, count * wanted + 1, wanted)
    found = csr_matrix((value_nm.ravel(), near_nm.ravel(), starts), shape=(count, count))
    itself = diags((unit_nK != 0).any(axis=1).astype(np.float32))
    found = found.maximum(found.T).maximum(itself).tocsr()
    found.eliminate_zeros()
    found.sort_indices()
    return found


def fits_dense(rows: int) -> bool:
    """Return whether all pairs of so many rows may be held."""
    return 4 * rows * rows <= DENSE_BYTES
