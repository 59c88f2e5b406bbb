"""Set functions that say how well a few rows stand for all, each with its gain given what was already taken.

    facility location  Σᵢ max_{j∈S} sᵢⱼ: every row has one near it (monotone submodular for s ≥ 0)
    graph cut          λ Σᵢ Σ_{j∈S} sᵢⱼ − Σ_{i,j∈S} sᵢⱼ: near to all, unlike each other (submodular; monotone for λ ≥ 2)
    feature based      Σᵤ g(Σ_{j∈S} xⱼᵤ), g concave: something of every feature (monotone submodular for x ≥ 0)

A row that was taken has no gain. Imports no torch. Shapes: n candidates, i items to be covered, B candidates at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.sparse import csr_matrix

ROWS_AT_ONCE = 64


class DenseFacilityLocation:
    """Facility location over similarity_ni (candidate, item), float32, at least 0."""

    def __init__(self, similarity_ni: np.ndarray) -> None:
        self._similarity_ni = similarity_ni
        self.size, items = similarity_ni.shape
        self.nearest_i = np.zeros(items, dtype=np.float32)
        """Similarity of each item to the nearest row taken."""
        self._ones_i = np.ones(items, dtype=np.float32)
        self._begun = False
        self._buffer_Bi = np.empty((min(ROWS_AT_ONCE, self.size), items), dtype=np.float32)

    def gains(self, rows_B: np.ndarray) -> np.ndarray:
        """Return how much nearer the items would be to the set."""
        if not self._begun and len(rows_B) == self.size:
            return np.asarray((self._similarity_ni @ self._ones_i)[rows_B], dtype=np.float64)
        gain_B = np.empty(len(rows_B))
        for start in range(0, len(rows_B), ROWS_AT_ONCE):
            part = rows_B[start : start + ROWS_AT_ONCE].tolist()
            nearer_bi = self._buffer_Bi[: len(part)]
            for at, row in enumerate(part):
                np.subtract(self._similarity_ni[row], self.nearest_i, out=nearer_bi[at])
            np.maximum(nearer_bi, 0.0, out=nearer_bi)
            gain_B[start : start + len(part)] = nearer_bi @ self._ones_i  # a sum, at the speed of memory
        return gain_B

    def add(self, row: int) -> None:
        """Put `row` into the set."""
        self._begun = True
        np.maximum(self.nearest_i, self._similarity_ni[row], out=self.nearest_i)


class SparseFacilityLocation:
    """Facility location over a sparse similarity_ni, at least 0; what is not stored is 0."""

    def __init__(self, similarity_ni: csr_matrix) -> None:
        self._starts, self._items, self._values = (
            similarity_ni.indptr.astype(np.int64),
            similarity_ni.indices,
            similarity_ni.data,
        )
        self.size = similarity_ni.shape[0]
        self.nearest_i = np.zeros(similarity_ni.shape[1], dtype=np.float32)

    def gains(self, rows_B: np.ndarray) -> np.ndarray:
        """Return how much nearer the items would be to the set."""
        if len(rows_B) == 1:
            here = slice(self._starts[rows_B[0]], self._starts[rows_B[0] + 1])
            nearer = self._values[here] - self.nearest_i[self._items[here]]
            return np.array([nearer[nearer > 0].sum(dtype=np.float64)])
        count_B = self._starts[rows_B + 1] - self._starts[rows_B]
        ends_B = count_B.cumsum()
        at = np.arange(ends_B[-1] if len(ends_B) else 0) + np.repeat(self._starts[rows_B] - (ends_B - count_B), count_B)
        nearer = np.maximum(self._values[at] - self.nearest_i[self._items[at]], 0.0)
        owner = np.repeat(np.arange(len(rows_B)), count_B)
        return np.bincount(owner, weights=nearer, minlength=len(rows_B))

    def add(self, row: int) -> None:
        """Put `row` into the set."""
        here = slice(self._starts[row], self._starts[row + 1])
        items = self._items[here]
        self.nearest_i[items] = np.maximum(self.nearest_i[items], self._values[here])


class GraphCut:
    """Graph cut over a dense symmetric similarity_nn, at least 0; `trade` is λ."""

    def __init__(self, similarity_nn: np.ndarray, trade: float = 2.0) -> None:
        self._similarity_nn, self.size = similarity_nn, len(similarity_nn)
        self._worth_n = trade * similarity_nn.sum(axis=0, dtype=np.float64) - similarity_nn.diagonal()
        self._inside_n = np.zeros(self.size)

    def gains(self, rows_B: np.ndarray) -> np.ndarray:
        """Return nearness to all less likeness to the set."""
        return np.asarray(self._worth_n[rows_B] - 2.0 * self._inside_n[rows_B])

    def add(self, row: int) -> None:
        """Put `row` into the set."""
        self._inside_n += self._similarity_nn[row]


class FeatureBased:
    """Feature-based function over amount_nK, at least 0; `concave` is g (the square root, or log(1 + x))."""

    def __init__(self, amount_nK: np.ndarray, concave: Callable[[np.ndarray], np.ndarray] = np.sqrt) -> None:
        if (amount_nK < 0).any():
            raise ValueError("an amount of a feature is negative")
        self._amount_nK, self.size, self._concave = amount_nK, len(amount_nK), concave
        self._total_K = np.zeros(amount_nK.shape[1])

    def gains(self, rows_B: np.ndarray) -> np.ndarray:
        """Return how much more of the features the set would hold, by g."""
        now = self._concave(self._total_K).sum()
        gain_B = np.empty(len(rows_B))
        for start in range(0, len(rows_B), ROWS_AT_ONCE):
            part = rows_B[start : start + ROWS_AT_ONCE]
            gain_B[start : start + len(part)] = self._concave(self._total_K + self._amount_nK[part]).sum(axis=1) - now
        return gain_B

    def add(self, row: int) -> None:
        """Put `row` into the set."""
        self._total_K += self._amount_nK[row]
