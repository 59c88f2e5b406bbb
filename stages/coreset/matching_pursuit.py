"""Weighted rows whose sum comes near to a given vector: orthogonal matching pursuit with weights of at least 0.

min_w ‖Aᵀw − b‖² + λ‖w‖², w ≥ 0, at most k of them not 0 (GradMatch, Killamsetty et al. 2021, algorithm 2): the row
that the residual points at most is taken, and all weights are solved for again. The solution before is where the next
one starts, and its Cholesky factor is changed by a row at a time: O(n·K + S·K + S²) a step where no weight falls to 0.
Imports no torch. Shapes: n rows, K numbers a row, S rows taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_triangular

from stages.meter.products import note, product

TINY = 1e-12
"""The share of a row's squared length outside the span of the weighted ones, or along the residual, that is none."""


@dataclass(frozen=True)
class Step:
    """A row taken, the weights of all rows taken so far (it the last), and ‖Aᵀw − b‖ / ‖b‖ with them."""

    row: int
    weight_S: np.ndarray
    error: float


def pursuit(feature_nK: np.ndarray, wanted_K: np.ndarray, *, ridge: float = 0.0) -> Iterator[Step]:
    """Yield a step after each row taken, until no row points along the residual. A weight may be 0, and rise again.

    Raises `ValueError` where `wanted_K` is zero or not finite.
    """
    feature_nK = np.asarray(feature_nK, dtype=np.float64)
    wanted_K = np.asarray(wanted_K, dtype=np.float64)
    size = float(np.linalg.norm(wanted_K))
    if not np.isfinite(size) or size == 0:
        raise ValueError(f"the vector to match has norm {size}")
    length_n = np.linalg.norm(feature_nK, axis=1)
    free_n = length_n > 0
    solution = _Solution(wanted_K, ridge)
    residual_K = wanted_K
    while free_n.any():
        along_n = np.where(free_n, product(feature_nK, residual_K), -np.inf)
        row = int(along_n.argmax())
        if along_n[row] <= TINY * length_n[row] * size:
            return
        free_n[row] = False
        solution.take(feature_nK[row])
        residual_K = solution.residual()
        yield Step(row, solution.weight_S.copy(), float(np.linalg.norm(residual_K)) / size)


def matching_pursuit(
    feature_nK: np.ndarray, wanted_K: np.ndarray, count: int, *, ridge: float = 0.0, tolerance: float = 1e-4
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rows, weights, errors): rows in the order taken, their final weights, the error after each.

    It ends with `count` rows, where the error is at most `tolerance`, or as `pursuit` does and with its errors.
    """
    steps: list[Step] = []
    for step in pursuit(feature_nK, wanted_K, ridge=ridge) if count else ():
        steps.append(step)
        if len(steps) == count or step.error <= tolerance:
            break
    rows = np.array([step.row for step in steps], dtype=np.int64)
    return rows, steps[-1].weight_S if steps else np.zeros(0), np.array([step.error for step in steps])


class _Solution:
    """Nonnegative least squares over rows that come one by one: Lawson & Hanson 1974, started from the one before.

    `weighted` are the places of the rows with a weight, in the order of the factor L: L Lᵀ = their Gram matrix + λI.
    """

    def __init__(self, wanted_K: np.ndarray, ridge: float) -> None:
        self._wanted_K, self._ridge = wanted_K, ridge
        self._row_SK = np.empty((16, len(wanted_K)))
        self._gram_SS, self._along_S = np.empty((16, 16)), np.empty(16)
        self._factor = np.empty((16, 16))
        self._weighted: list[int] = []
        self.weight_S = np.zeros(0)

    def residual(self) -> np.ndarray:
        """Return b − Aᵀw."""
        weighted = self._weighted
        return self._wanted_K - product(self.weight_S[weighted], self._row_SK[weighted])

    def take(self, row_K: np.ndarray) -> None:
        """Add a row and solve."""
        at = len(self.weight_S)
        if at == len(self._row_SK):
            self._grow()
        self._row_SK[at] = row_K
        self._gram_SS[at, : at + 1] = product(self._row_SK[: at + 1], row_K)
        self._gram_SS[:at, at] = self._gram_SS[at, :at]
        self._along_S[at] = product(row_K, self._wanted_K)
        self.weight_S = np.append(self.weight_S, 0.0)
        refused = np.zeros(at + 1, dtype=bool)
        entering = at
        while self._enter(entering):
            self._settle()
            if self.weight_S[entering] == 0.0:
                refused[entering] = True  # rounding alone made it look useful
            entering = self._next(refused)
            if entering < 0:
                return

    def _next(self, refused: np.ndarray) -> int:
        """Return the place of the row without weight whose weight would lower the error most, −1 where none would."""
        count, weighted = len(self.weight_S), self._weighted
        pull_S = self._along_S[:count] - product(self._gram_SS[:count, weighted], self.weight_S[weighted])
        pull_S[weighted] = -np.inf
        pull_S[refused] = -np.inf
        best = int(pull_S.argmax())
        length = np.sqrt(self._gram_SS[best, best])
        return best if pull_S[best] > TINY * length * np.linalg.norm(self._wanted_K) else -1

    def _enter(self, place: int) -> bool:
        """Append the row to the factor; return whether it adds to the span of those that are in."""
        count, own = len(self._weighted), self._gram_SS[place, place] + self._ridge
        new = _solved(self._factor[:count, :count], self._gram_SS[self._weighted, place])
        left = own - product(new, new)
        if left <= TINY * own:
            return False
        self._factor[count, :count], self._factor[count, count] = new, np.sqrt(left)
        self._weighted.append(place)
        return True

    def _settle(self) -> None:
        """Go to the best weights of those that are in, leaving out what would fall below 0 on the way."""
        while self._weighted:
            factor = self._factor[: len(self._weighted), : len(self._weighted)]
            best = _solved(factor, _solved(factor, self._along_S[self._weighted]), transposed=True)
            now = self.weight_S[self._weighted]
            if (best > 0).all():
                self.weight_S[self._weighted] = best
                return
            falling = best <= 0
            share = (now[falling] / (now[falling] - best[falling])).min(initial=1.0)
            now = now + share * (best - now)
            ended = falling & (now <= 1e-15 * now.max(initial=0.0))
            ended |= falling & (now == now[falling].min())
            now[ended] = 0.0
            self.weight_S[self._weighted] = now
            for at in np.flatnonzero(ended)[::-1].tolist():
                self._leave(at)

    def _leave(self, at: int) -> None:
        """Take a row out of the factor by Givens rotations of what stands behind it."""
        count, factor = len(self._weighted), self._factor
        factor[at : count - 1, :count] = factor[at + 1 : count, :count].copy()
        for turn in range(at, count - 1):
            radius = np.hypot(factor[turn, turn], factor[turn, turn + 1])
            cosine, sine = factor[turn, turn] / radius, factor[turn, turn + 1] / radius
            left, right = factor[turn : count - 1, turn].copy(), factor[turn : count - 1, turn + 1].copy()
            factor[turn : count - 1, turn] = cosine * left + sine * right
            factor[turn : count - 1, turn + 1] = cosine * right - sine * left
        del self._weighted[at]

    def _grow(self) -> None:
        at = len(self._row_SK)
        self._row_SK = np.concatenate([self._row_SK, np.empty_like(self._row_SK)])
        self._along_S = np.concatenate([self._along_S, np.empty_like(self._along_S)])
        for name in ("_gram_SS", "_factor"):
            grown = np.empty((2 * at, 2 * at))
            grown[:at, :at] = getattr(self, name)
            setattr(self, name, grown)


def _solved(factor: np.ndarray, right: np.ndarray, *, transposed: bool = False) -> np.ndarray:
    if not len(right):
        return np.zeros(0)
    note(len(right) ** 2)
    return np.asarray(solve_triangular(factor, right, lower=True, trans=int(transposed), check_finite=False))
