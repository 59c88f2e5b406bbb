"""One scorer over some rows of the pool: shard by shard, resumable, each row's result kept on disk until the end.

A pass has a name and its rows; its shards lie under that name and are found again by the next attempt. What is done
with the numbers, and which rows are asked for, is the coverage's business; how a shard is scored is `fill.py`'s,
by whom, the pool's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.errors import MethodError
from stages.score.features import gathered, rescored
from stages.score.fill import Filled
from stages.score.partition import shards
from stages.score.places import at
from stages.score.scorer import Scorer
from stages.score.shards import Shard, ShardFolder
from stages.score.supply import Opened

FAILED_ROWS = 32
"""A shard of at least this many rows that all raise, before any was scored, stops the stage: the method is broken."""

Fill = Callable[[Iterable[tuple[int, np.ndarray]]], Iterator[Filled]]
"""Scores and writes the shards of these (start, rows), and says so of each in their order."""


class ScorePass:
    """Some rows of the pool, scored by one method.

    Args:
        lengths_N: tokens that are looked at of each row of the pool.
        rows: ascending places in the pool.
        folder: where shards go.
        most: padded tokens of a batch.

    `flops` and `tokens` are what the rows took (in whichever attempt), without preparing the method.
    """

    def __init__(
        self, method: Scorer, lengths_N: np.ndarray, pool: pa.Table, rows: np.ndarray, folder: ShardFolder, most: int
    ) -> None:
        self.method, self.rows, self._pool, self._folder = method, rows, pool, folder
        before = np.concatenate([[0], np.cumsum(lengths_N[rows], dtype=np.int64)])
        self._ranges = list(shards(pool.column("example_id"), rows, before, most))
        self.seen_tokens = int(before[-1])
        """Of the rows, as far as they are looked at."""
        self._before = before
        self._gathered: Any = None
        self.missing = [(start, stop) for start, stop in self._ranges if self._read(start, stop) is None]
        """Shards that are not there yet."""
        self.found = len(self._ranges) - len(self.missing)
        self.flops = self.tokens = self.taken = 0
        self.scored_any = self.found > 0
        """Whether any row could be scored, or was in an attempt before."""

    def complete(self, fill: Fill, bar: Any, *, proven: bool = False) -> ScorePass:
        """Score each shard that is not there yet; of a method that is `proven` all rows may fail."""
        missing = dict(self.missing)
        bar.advance(float(sum(self._tokens(*each) for each in self._ranges if each[0] not in missing)))
        raised, failure = 0, ""
        for told in fill((start, self.rows[start:stop]) for start, stop in self.missing):
            raised, failure = raised + told.raised, failure or told.failure
            if not told.good and not (proven or self.scored_any) and raised >= min(FAILED_ROWS, len(self.rows)):
                raise MethodError(
                    f"scorer {self.method.name()} scores at least one row",
                    f"all of the first {told.rows} failed, such as {failure}",
                    "mend the method, or look at the first row's quarantine entry",
                )
            if not told.good:
                self._folder.keep(told.start)
            self.scored_any |= told.good > 0
            bar.advance(float(self._tokens(told.start, missing[told.start])))
        for shard in self._all():
            self.flops += shard.flops
            self.tokens += shard.tokens
            self.taken += shard.taken
        return self

    def gather(self, opened: Opened) -> None:
        """Make of all rows' features what the second pass needs, for a method that has one."""
        meter = opened.given.meter
        before = meter.flops
        self._gathered = gathered(self.method, (shard.table for shard in self._all()), opened.state)
        self.flops += meter.flops - before

    def _tokens(self, start: int, stop: int) -> int:
        return int(self._before[stop] - self._before[start])

    def _read(self, start: int, stop: int) -> Shard | None:
        if not self._folder.holds(start):
            return None
        return self._folder.read(start, at(self._pool.column("example_id"), self.rows[start:stop]))

    def _all(self, low: int = 0, high: int | None = None) -> Iterator[Shard]:
        """Yield the shards that hold places `low` to `high` (excluded) of this pass."""
        first = max(0, bisect_right(self._ranges, (low, len(self.rows))) - 1)
        for start, stop in self._ranges[first:]:
            if high is not None and start >= high:
                return
            shard = self._read(start, stop)
            assert shard is not None, "a shard that was just completed"
            if self._gathered is not None:
                table = rescored(self.method, shard.table, self._gathered, self._folder.combine)
                shard = replace(shard, table=table)
            yield shard

    def score(self) -> np.ndarray:
        """Return score_n float32 of the rows, NaN where there is none."""
        parts = [shard.table.column("score").to_numpy() for shard in self._all()]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)

    def columns(self) -> np.ndarray:
        """Return group_nJ float32 of the rows, NaN where there is none."""
        found = [(shard.start, shard.table.column("group_scores").combine_chunks()) for shard in self._all()]
        widths = [pc.list_value_length(column).to_numpy() for _, column in found]
        width = max((int(lengths.max()) for lengths in widths), default=1)
        group_nJ = np.full((len(self.rows), max(1, width)), np.nan, dtype=np.float32)
        for (start, column), lengths in zip(found, widths, strict=True):
            group_nJ[start + np.flatnonzero(lengths)] = column.flatten().to_numpy().reshape(-1, width)  # or none at all
        return group_nJ

    def between(self, low: int, high: int) -> Iterator[tuple[np.ndarray, pa.Table]]:
        """Yield (places in the pool, their results) of what this pass holds of the pool's rows `low` to `high`."""
        first, last = np.searchsorted(self.rows, [low, high])
        if first == last:
            return
        for shard in self._all(int(first), int(last)):
            rows = self.rows[shard.start : shard.start + shard.table.num_rows]
            inside = np.flatnonzero((rows >= low) & (rows < high))
            yield rows[inside], shard.table.slice(int(inside[0]), len(inside))
