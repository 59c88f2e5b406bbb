"""One scorer over some rows of the pool: shard by shard, resumable, each row's result kept on disk until the end.

A pass has a name and its rows; its shards lie under that name and are found again by the next attempt. What is done
with the numbers, and which rows are asked for, is the coverage's business; how a batch is scored is `blocks.py`'s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.errors import MethodError
from stages.score.blocks import BlockScorer, Outcome
from stages.score.features import gathered, rescored
from stages.score.partition import shards
from stages.score.places import at
from stages.score.reuse import Earlier
from stages.score.scorer import Scorer
from stages.score.shards import Shard, ShardFolder
from stages.score.supply import BlockMaker, Opened

FAILED_ROWS = 32
"""A shard of at least this many rows that all raise, before any was scored, stops the stage: the method is broken."""

COPIED = ("example_id", "source", "n_tokens", "n_answer_tokens")


class ScorePass:
    """Some rows of the pool, scored by one method.

    Args:
        rows: ascending places in the pool.
        maker: makes their blocks.
        folder: where shards go.
        most: padded tokens of a batch.
        taken: rows of an earlier commit that may be taken over; None: all are scored.

    `flops` and `tokens` are what the rows took (in whichever attempt), without preparing the method.
    """

    def __init__(
        self,
        opened: Opened,
        maker: BlockMaker,
        pool: pa.Table,
        rows: np.ndarray,
        folder: ShardFolder,
        most: int,
        taken: Earlier | None,
    ) -> None:
        self.method: Scorer = opened.method
        self.rows, self._pool, self._folder, self._taken = rows, pool, folder, taken
        self._meter, self._maker = opened.given.meter, maker
        before = np.concatenate([[0], np.cumsum(maker.lengths_N[rows], dtype=np.int64)])
        self._ranges = list(shards(pool.column("example_id"), rows, before, most))
        self.seen_tokens = int(before[-1])
        """Of the rows, as far as they are looked at."""
        self._tokens = before[[stop for _, stop in self._ranges]] - before[[start for start, _ in self._ranges]]
        self._gathered: Any = None
        self.flops = self.tokens = self.found = self.taken = 0
        self.scored_any = False
        """Whether any row could be scored, or was in an attempt before."""

    def complete(self, scorer: BlockScorer, bar: Any, *, proven: bool = False) -> ScorePass:
        """Score each shard that is not there yet; of a method that is `proven` all rows may fail."""
        missing = {start for start, stop in self._ranges if self._read(start, stop) is None}
        self.found = len(self._ranges) - len(missing)
        self.scored_any = self.found > 0
        for (start, stop), tokens in zip(self._ranges, self._tokens.tolist(), strict=True):
            if start in missing:
                self.scored_any |= self._score(scorer, start, stop, proven or self.scored_any)
            bar.advance(float(tokens))
        for shard in self._all():
            self.flops += shard.flops
            self.tokens += shard.tokens
            self.taken += shard.taken
        if self.method.second_pass:
            before = self._meter.flops
            self._gathered = gathered(self.method, (shard.table for shard in self._all()), scorer.state)
            self.flops += self._meter.flops - before
        return self

    def _score(self, scorer: BlockScorer, start: int, stop: int, scored_any: bool) -> bool:
        """Score one shard and return whether any row of it could be scored."""
        meter, taken = self._meter, 0
        flops, tokens = meter.flops, meter.tokens
        outcomes: dict[int, Outcome] = {}
        for batch in self._maker.batches(self.rows[start:stop]):
            earlier = self._taken.take(batch) if self._taken is not None else None
            taken += len(earlier) if earlier is not None else 0
            outcomes.update(zip(batch, earlier or scorer.score(batch), strict=True))
        found = [outcomes[row] for row in self.rows[start:stop].tolist()]
        good = sum(not outcome.reason for outcome in found)
        if not good and not scored_any and len(scorer.failures) >= min(FAILED_ROWS, len(self.rows)):
            raise MethodError(
                f"scorer {self.method.name()} scores at least one row",
                f"all of the first {len(found)} failed, such as {scorer.failures[0]}",
                "mend the method, or look at the first row's quarantine entry",
            )
        part = at(self._pool.select(COPIED), self.rows[start:stop])
        self._folder.write(start, part, found, flops=meter.flops - flops, tokens=meter.tokens - tokens, taken=taken)
        return good > 0

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
