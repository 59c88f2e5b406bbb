"""Scoring shards of a pass with one prepared method: the same steps in this process and on a worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stages.score.blocks import BlockScorer, Outcome
from stages.score.places import at
from stages.score.reuse import Earlier
from stages.score.shards import ShardFolder
from stages.score.supply import BlockMaker, Opened

COPIED = ("example_id", "source", "n_tokens", "n_answer_tokens")


@dataclass(frozen=True)
class Filled:
    """What is said of a shard that was written: its rows, those with a score, those at which the method raised, and
    the first of what it raised."""

    start: int
    rows: int
    good: int
    raised: int
    failure: str


class Filler:
    """Scores shards of one pass.

    Args:
        maker: makes their blocks.
        taken: rows of an earlier commit that may be taken over; None: all are scored.
    """

    def __init__(
        self, opened: Opened, maker: BlockMaker, pool: pa.Table, folder: ShardFolder, taken: Earlier | None
    ) -> None:
        self._scorer = BlockScorer(opened.method, opened.state, maker.block, maker.settle, folder.combine)
        self._maker, self._meter, self._pool, self._folder, self._taken = maker, opened.given.meter, pool, folder, taken

    def fill(self, start: int, rows: np.ndarray) -> Filled:
        """Score the shard of these rows and write it; where no row has a score, whoever asked decides whether to keep
        it."""
        meter, taken = self._meter, 0
        flops, tokens = meter.flops, meter.tokens
        self._scorer.failures.clear()
        outcomes: dict[int, Outcome] = {}
        for batch in self._maker.batches(rows):
            earlier = self._taken.take(batch) if self._taken is not None else None
            taken += len(earlier) if earlier is not None else 0
            outcomes.update(zip(batch, earlier or self._scorer.score(batch), strict=True))
        found = [outcomes[row] for row in rows.tolist()]
        part = at(self._pool.select(COPIED), rows)
        self._folder.write(start, part, found, flops=meter.flops - flops, tokens=meter.tokens - tokens, taken=taken)
        failures = self._scorer.failures
        good = sum(not outcome.reason for outcome in found)
        if good:
            self._folder.keep(start)
        return Filled(start, len(rows), good, len(failures), failures[0] if failures else "")
