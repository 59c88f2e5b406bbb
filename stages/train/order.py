"""Which example is visited when: one permutation an epoch, phase by phase, cut into windows and micro-batches.

A pure function of (lengths, repeats, phases, seed): the same on every worker and after every resume. A segment that
goes on with a selection goes on in its stream, so that a pass is finished before the next begins. In an epoch a
phase of the selection (its column `order`) ends before the next begins; in a phase the visits of a row are spread
evenly, each by chance in its own part, so that rows that repeat equally are all visited before one is visited again.
Inside a window rows are sorted by length, or packed; the gradient of a window does not depend on that (see the step),
only its padding does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from data_contracts.config import TrainConfig
from data_contracts.errors import ConfigError, InputError
from data_contracts.records import Plan
from stages.model.batch import Row
from stages.model.packing import pack
from stages.technique.batch_selector import batch_selector_of


@dataclass(frozen=True)
class Visits:
    """The stream of visits of a segment.

    Args:
        repeats: visits an epoch of each selected row, in the selection's order; int, shape (rows,).
        epochs: passes over them, may be fractional; at least one visit is made.
        window: examples an optimizer step, all workers together.
        seed: of the permutations.
        drop_last: leave out a last window that is not full.
        phases: of each row, at least 0, in the selection's order; int, shape (rows,). None: there is one.
        start: visits of this stream that segments before made; this one goes on behind them.

    An epoch smaller than a window is one smaller window, so that no window holds a row more often than it repeats.
    """

    repeats: np.ndarray
    epochs: float
    window: int
    seed: int
    drop_last: bool = False
    phases: np.ndarray | None = None
    start: int = 0
    _epochs: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def epoch_visits(self) -> int:
        """Visits an epoch."""
        return int(self.repeats.sum())

    @property
    def total(self) -> int:
        """Visits of the segment, before a last window is dropped."""
        return max(1, round(self.epochs * self.epoch_visits))

    @property
    def width(self) -> int:
        """Visits of a full window."""
        return min(self.window, self.epoch_visits)

    @property
    def steps(self) -> int:
        """Optimizer steps of the segment."""
        return self.total // self.width if self.drop_last else math.ceil(self.total / self.width)

    def visited(self, steps: int) -> int:
        """Return the visits of the stream after so many steps, those before the segment among them."""
        return self.start + min(steps * self.width, self.total)

    def phases_after(self, steps: int) -> tuple[int, int]:
        """Return (phases that the stream has begun after so many steps, phases of the selection)."""
        if self.phases is None:
            return 1, 1
        found, place = np.unique(self.phases, return_inverse=True)
        ends = np.bincount(place, self.repeats).cumsum()
        return min(int(np.searchsorted(ends, self.visited(steps))) + 1, len(found)), len(found)

    def __getitem__(self, step: int) -> np.ndarray:
        """Return the row indices (into `repeats`) of window `step`, in visiting order, or raise IndexError."""
        if not 0 <= step < self.steps:
            raise IndexError(step)
        start, stop = self.visited(step), self.visited(step + 1)
        size = self.epoch_visits
        parts = []
        while start < stop:
            epoch, inside = divmod(start, size)
            take = min(stop - start, size - inside)
            parts.append(self._epoch(epoch)[inside : inside + take])
            start += take
        return np.concatenate(parts)

    def _epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            rows = np.arange(len(self.repeats), dtype=np.int32)
            stream, first = np.repeat(rows, self.repeats), np.cumsum(self.repeats) - self.repeats
            visit = np.random.default_rng([self.seed, epoch]).permutation(len(stream))
            row, chance = stream[visit], np.arange(len(stream)) / len(stream)
            when = (visit - first[row] + chance) / self.repeats[row]  # visit j of r falls into [j / r, (j + 1) / r)
            phase = np.zeros_like(rows) if self.phases is None else self.phases
            while len(self._epochs) >= 2:  # a stream is read forwards: the epoch being read and the one after it
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = row[np.lexsort((when, phase[row]))]
        return self._epochs[epoch]


def visits_of(
    repeats: np.ndarray, plan: Plan, train: TrainConfig, seed: int, phases: np.ndarray | None = None, start: int = 0
) -> Visits:
    """Return a segment's stream: windows of micro-batch x accumulation x ranks visits, times the candidates that a
    batch selector picks each of them from."""
    selector = batch_selector_of(train)
    window = plan.micro_batch * plan.accumulation * max(1, plan.workers) * (selector.candidates if selector else 1)
    return Visits(repeats, train.epochs, window, seed, train.drop_last, phases, start)


def refuse_no_step(rows: int, plan: Plan, train: TrainConfig) -> None:
    """Raise `ConfigError` with the numbers where `rows` visits an epoch give no step; nothing is loaded before."""
    factors = [plan.micro_batch, plan.accumulation, *([plan.workers] if plan.workers > 1 else [])]
    if (selector := batch_selector_of(train)) is not None:
        factors.append(selector.candidates)
    window = math.prod(factors)
    if train.drop_last and rows < window:
        raise ConfigError(
            "training makes at least one optimizer step",
            f"0 steps: {rows} rows < {' x '.join(map(str, factors))} = {window} per step with drop_last",
            "lower the batch/accumulation (`plan.window`) or turn `train.drop_last` off",
        )


def check_rows(validation_rows: int) -> None:
    """Refuse an empty validation split. Raises `InputError`; nothing is loaded before."""
    if validation_rows == 0:
        raise InputError(
            "`validation` holds at least one usable row: checkpoints are chosen on it",
            "it has none",
            "give `data.validation`, or a target large enough to cut it from",
        )


@dataclass(frozen=True)
class MicroBatch:
    """One forward+backward: the documents of each row, as places in the window, and the padded length."""

    rows: tuple[tuple[int, ...], ...]
    padded: int

    @property
    def places(self) -> list[int]:
        """Places in the window of its documents, in batch order."""
        return [place for row in self.rows for place in row]


def lay_out(lengths: Sequence[int], micro_batch: int, *, row_tokens: int | None = None) -> list[MicroBatch]:
    """Cut a window into micro-batches, longest first.

    Args:
        lengths: tokens of each visit of the window.
        micro_batch: rows a forward+backward.
        row_tokens: pack documents into rows of at most so many tokens; None gives each its own row.

    Worker r takes micro-batches r, r + ranks, r + 2 ranks, …: neighbours in length, so that they wait little.
    """
    if row_tokens is None:
        rows: list[tuple[int, ...]] = [
            (place,) for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
        ]
    else:
        documents = [Row("", np.zeros(length, np.int32), np.zeros(length, bool)) for length in lengths]
        rows = [tuple(group) for group in pack(documents, max(row_tokens, *lengths))]
        rows.sort(key=lambda row: (-sum(lengths[place] for place in row), row))
    cut = [tuple(rows[start : start + micro_batch]) for start in range(0, len(rows), micro_batch)]
    return [MicroBatch(part, max(sum(lengths[place] for place in row) for row in part)) for part in cut]
