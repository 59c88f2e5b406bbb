"""Greedy maximisation of a set function: exact by lazy evaluation, or on a random sample of candidates a step.

For a monotone submodular f (each gain only falls as the set grows) greedy reaches (1 − 1/e) of the best set of its size
(Nemhauser, Wolsey & Fisher 1978). Lazy evaluation (Minoux 1978) gives exactly greedy's answer: an old gain is an upper
bound, so only candidates whose bound beats the best are looked at again; where an objective keeps all gains up to date
the largest is taken. Stochastic greedy (Mirzasoleiman et al. 2015)
looks at (n/k) ln(1/ε) candidates a step and reaches 1 − 1/e − ε in expectation. Ties go to the smaller row. Imports no
torch. Shapes: n candidates, B of them at a time.
"""

from __future__ import annotations

import heapq
import math
from typing import Protocol

import numpy as np

MOST_TOGETHER = 64


class Objective(Protocol):
    """A set function that grows by one row at a time."""

    size: int
    """Candidates: rows 0 to size − 1."""

    def kept(self) -> np.ndarray | None:
        """Return the gains of all candidates, float64, where they are kept up to date; None: they must be asked for."""

    def gains(self, rows_B: np.ndarray) -> np.ndarray:
        """Return f(S ∪ {row}) − f(S) of each row, float64; S is what was added so far."""

    def add(self, row: int) -> None:
        """Put `row` into S."""


def lazy_greedy(objective: Objective, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, gains) of greedy's choice of `count` rows, or of all where there are fewer.

    The objective must be submodular; its gains are then non-increasing, and are made so where rounding says otherwise.
    Gains that are not finite raise `ValueError`: a bound that is not a number would never be beaten.
    """
    count = min(count, objective.size)
    rows, gains = np.empty(count, dtype=np.int64), np.empty(count)
    taken_n = np.zeros(objective.size, dtype=bool)
    heap: _Heap | None = None
    for step in range(count):
        every_n = objective.kept()
        if every_n is None:
            heap = heap or _Heap(objective)
            rows[step], gains[step] = heap.best(step)
        else:
            every_n = np.where(taken_n, -np.inf, every_n)
            rows[step] = every_n.argmax()
            gains[step] = every_n[rows[step]]
            _finite(gains[step])
        gains[step] = min(gains[step], gains[step - 1]) if step else gains[step]
        taken_n[rows[step]] = True
        objective.add(int(rows[step]))
    return rows, gains


class _Heap:
    """Candidates by their bounds, largest first; a bound is the gain at some earlier step."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        bound_n = _finite(objective.gains(np.arange(objective.size)))
        self._heap = list(zip((-bound_n).tolist(), range(objective.size), strict=True))
        heapq.heapify(self._heap)
        self._seen = [0] * objective.size  # the step at which a bound was computed

    def best(self, step: int) -> tuple[int, float]:
        """Take out the row with the largest gain; return it and the gain. `step` counts the rows that were taken."""
        heap, seen = self._heap, self._seen
        together = 1  # looked at in one call: few where the first is the best, many where the order has changed
        while seen[heap[0][1]] < step:
            stale = [heapq.heappop(heap)]
            while len(stale) < together and heap and seen[heap[0][1]] < step:
                stale.append(heapq.heappop(heap))
            found_B = _finite(self._objective.gains(np.array([row for _, row in stale]))).tolist()
            for gain, (minus, row) in zip(found_B, stale, strict=True):
                seen[row] = step
                heapq.heappush(heap, (minus if minus > -gain else -gain, row))
            together = min(2 * together, MOST_TOGETHER)
        minus, row = heapq.heappop(heap)
        return row, -minus


def kept_greedy(objective: Objective, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, gains) of greedy's choice for an objective that keeps all gains; it need not be submodular."""
    count = min(count, objective.size)
    rows, gains = np.empty(count, dtype=np.int64), np.empty(count)
    taken_n = np.zeros(objective.size, dtype=bool)
    for step in range(count):
        every_n = objective.kept()
        assert every_n is not None, "the objective keeps its gains"
        rows[step] = np.where(taken_n, -np.inf, _finite(every_n)).argmax()
        gains[step] = every_n[rows[step]]
        taken_n[rows[step]] = True
        objective.add(int(rows[step]))
    return rows, gains


def stochastic_greedy(
    objective: Objective, count: int, rng: np.random.Generator, *, epsilon: float = 0.05
) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, gains) like `lazy_greedy`, each step looking at (n/count) ln(1/epsilon) random candidates."""
    count = min(count, objective.size)
    rows, gains = np.empty(count, dtype=np.int64), np.empty(count)
    looked = math.ceil(objective.size / max(count, 1) * math.log(1 / epsilon))
    left = np.arange(objective.size)
    for step in range(count):
        drawn = np.sort(rng.choice(left, min(looked, len(left)), replace=False))
        found = _finite(objective.gains(drawn))
        best = int(found.argmax())
        rows[step], gains[step] = drawn[best], found[best]
        objective.add(int(drawn[best]))
        left = np.delete(left, np.searchsorted(left, drawn[best]))
    return rows, gains


def _finite(gains: np.ndarray) -> np.ndarray:
    gains = np.asarray(gains, dtype=np.float64)
    if not np.isfinite(gains).all():
        raise ValueError(f"{int((~np.isfinite(gains)).sum())} gains are not finite")
    return gains
