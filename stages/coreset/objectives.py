"""Set functions that say how well a few rows stand for all, each with its gain given what was already taken.

    facility location  Σᵢ max_{j∈S} sᵢⱼ: every row has one near it (monotone submodular for s ≥ 0)
    graph cut          λ Σᵢ Σ_{j∈S} sᵢⱼ − Σ_{i,j∈S} sᵢⱼ: near to all, unlike each other (submodular; monotone for λ ≥ 2)
    feature based      Σᵤ g(Σ_{j∈S} xⱼᵤ), g concave: something of every feature (monotone submodular for x ≥ 0)
    alignment          Σ_{j∈S} wⱼ − λ/2 Σ_{i,j∈S} sᵢⱼ: each worth much, together no step too far (not monotone)

A row that was taken has no gain. Imports no torch. Shapes: n candidates, i items to be covered, B candidates at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.sparse import csr_matrix

ROWS_AT_ONCE = 64
ROWS_CACHED = 16
"""Dense rows worked on at once: 320 kB of 5,000 items stay near the processor."""
FEWEST_TAKEN, MOST_LEFT = 12, 1 / 8
"""Rows taken before pairs are left out, and the largest share of pairs that is then gone on with."""


class DenseFacilityLocation:
    """Facility location over similarity_ni (candidate, item), float32, at least 0.

    A pair that is no nearer than its item's nearest row taken gains nothing, now or ever. So once as many rows were
    looked at as there are candidates, only the other pairs are gone on with: some 3 % after twelve rows of real text.
    """

    def __init__(self, similarity_ni: np.ndarray) -> None:
        self._similarity_ni = similarity_ni
        self.size, items = similarity_ni.shape
        self.nearest_i = np.zeros(items, dtype=np.float32)
        """Similarity of each item to the nearest row taken."""
        self._ones_i = np.ones(items, dtype=np.float32)
        self._taken = self._looked = 0
        self._buffer_Bi = np.empty((min(ROWS_CACHED, self.size), items), dtype=np.float32)
        self._left: SparseFacilityLocation | None = None

    def kept(self) -> np.ndarray | None:
        """Return every candidate's gain, once few pairs are left."""
        return None if self._left is None else self._left.kept()

    def gains(self, rows_B: np.ndarray) -> np.ndarray:
        """Return how much nearer the items would be to the set."""
        if self._left is not None:
            return self._left.gains(rows_B)
        if not self._taken and len(rows_B) == self.size:
            return np.asarray((self._similarity_ni @ self._ones_i)[rows_B], dtype=np.float64)
        self._looked += len(rows_B)
        gain_B = np.empty(len(rows_B))
        for start in range(0, len(rows_B), ROWS_CACHED):
            part_b = rows_B[start : start + ROWS_CACHED]
            nearer_bi = self._buffer_Bi[: len(part_b)]
            np.take(self._similarity_ni, part_b, axis=0, out=nearer_bi, mode="clip")
            np.maximum(nearer_bi, self.nearest_i, out=nearer_bi)  # beside an array, not 0: twice as fast
            np.subtract(nearer_bi, self.nearest_i, out=nearer_bi)
            gain_B[start : start + len(part_b)] = nearer_bi @ self._ones_i  # a sum, at the speed of memory
        return gain_B

    def add(self, row: int) -> None:
        """Put `row` into the set."""
        if self._left is not None:
            self._left.add(row)
            return
        np.maximum(self.nearest_i, self._similarity_ni[row], out=self.nearest_i)
        self._taken += 1
        if self._taken >= FEWEST_TAKEN and self._looked > self.size:
            self._looked = 0
            if (self._similarity_ni[::ROWS_AT_ONCE] > self.nearest_i).mean() <= MOST_LEFT:
                self._left = SparseFacilityLocation(nearer_pairs(self._similarity_ni, self.nearest_i), self.nearest_i)


class SparseFacilityLocation:
    """Facility location over a sparse similarity_ni, at least 0; what is not stored is 0 (or below `nearest_i`).

    Every gain is kept up to date: a row that is taken changes those alone that share an item that it is nearest to.
    """

    def __init__(self, similarity_ni: csr_matrix, nearest_i: np.ndarray | None = None) -> None:
        self.size, items = similarity_ni.shape
        self.nearest_i = np.zeros(items, dtype=np.float32) if nearest_i is None else nearest_i
        self._starts, self._items, self._values = similarity_ni.indptr, similarity_ni.indices, similarity_ni.data
        by_item = similarity_ni.tocsc()
        self._item_starts, self._rows, self._item_values = (
            by_item.indptr.astype(np.int64),
            by_item.indices,
            by_item.data,
        )
        nearer = np.maximum(self._values - self.nearest_i[self._items], 0.0)
        owner = np.repeat(np.arange(self.size), np.diff(self._starts))
        self._gain_n = np.bincount(owner, weights=nearer, minlength=self.size)

    def kept(self) -> np.ndarray:
        """Return every candidate's gain."""
        return self._gain_n

    def gains(self, rows_B: np.ndarray) -> np.ndarray:
        """Return how much nearer the items would be to the set."""
        return np.asarray(self._gain_n[rows_B])

    def add(self, row: int) -> None:
        """Put `row` into the set."""
        here = slice(self._starts[row], self._starts[row + 1])
        nearer = self._values[here] > self.nearest_i[self._items[here]]
        item_j, new_j = self._items[here][nearer], self._values[here][nearer]
        old_j, self.nearest_i[item_j] = self.nearest_i[item_j], new_j
        start_j = self._item_starts[item_j]
        count_j = self._item_starts[item_j + 1] - start_j
        end_j = count_j.cumsum()
        at = np.arange(end_j[-1] if len(end_j) else 0) + (start_j - (end_j - count_j)).repeat(count_j)
        lost = np.minimum(self._item_values[at], new_j.repeat(count_j)).astype(np.float64) - old_j.repeat(count_j)
        np.maximum(lost, 0.0, out=lost)
        np.subtract.at(self._gain_n, self._rows[at], lost)


def nearer_pairs(similarity_ni: np.ndarray, nearest_i: np.ndarray) -> csr_matrix:
    """Return the pairs above `nearest_i` of their item, sparse, some rows of memory at a time."""
    starts, items, values = [0], [], []
    for start in range(0, len(similarity_ni), ROWS_AT_ONCE):
        part_Bi = similarity_ni[start : start + ROWS_AT_ONCE]
        at = np.flatnonzero(part_Bi > nearest_i)
        row, item = np.divmod(at, len(nearest_i))
        items.append(item.astype(np.int32))
        values.append(part_Bi.ravel()[at])
        starts.extend((starts[-1] + np.bincount(row, minlength=len(part_Bi)).cumsum()).tolist())
    return csr_matrix((np.concatenate(values), np.concatenate(items), np.array(starts)), shape=similarity_ni.shape)


class GraphCut:
    """Graph cut over a dense symmetric similarity_nn, at least 0; `trade` is λ."""

    def __init__(self, similarity_nn: np.ndarray, trade: float = 2.0) -> None:
        self._similarity_nn, self.size = similarity_nn, len(similarity_nn)
        self._worth_n = trade * similarity_nn.sum(axis=0, dtype=np.float64) - similarity_nn.diagonal()
        self._inside_n = np.zeros(self.size)

    def kept(self) -> np.ndarray:
        """Return every candidate's gain."""
        return np.asarray(self._worth_n - 2.0 * self._inside_n)

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

    def kept(self) -> None:
        """Return None: a row that is taken changes all gains."""

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


class Alignment:
    """Worth of each row less half of `trade` times the likeness of all pairs taken, each row to itself among them.

    With gradients' products for both, what a step along their sum takes off a loss, to second order (GREATS, Wang et
    al. 2024, section 4). Where likeness is negative it is not submodular: choose by `kept_greedy`.
    """

    def __init__(self, worth_n: np.ndarray, likeness_nn: np.ndarray, trade: float) -> None:
        self.size = len(worth_n)
        self._trade, self._likeness_nn = trade, np.asarray(likeness_nn, dtype=np.float64)
        self._gain_n = np.asarray(worth_n, dtype=np.float64) - trade / 2 * self._likeness_nn.diagonal()

    def kept(self) -> np.ndarray:
        """Return every candidate's gain."""
        return self._gain_n

    def gains(self, rows_B: np.ndarray) -> np.ndarray:
        """Return worth less likeness to the set."""
        return np.asarray(self._gain_n[rows_B])

    def add(self, row: int) -> None:
        """Put `row` into the set."""
        self._gain_n = self._gain_n - self._trade * self._likeness_nn[row]
