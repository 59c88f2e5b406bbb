"""Rows already scored, taken over when the pool has grown: the same numbers to the byte, not computed again.

A commit of the same work on other rows (`Stage.kin`) holds them. What is taken over is a whole batch: the rows of a
batch follow from the tree of `partition.py` alone, so where the earlier pool has a batch of the same rows with the same
tokens, its numbers are those that this one would give. A single row is not: floating-point sums depend on the shape of
the batch that a row stands in (on CPU in float32 the last bits differ). A batch with a row without a score is computed
again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from data_contracts.arrow import TABLE_FILE, read_table
from stages.score.blocks import Outcome
from stages.score.partition import batches, shards
from stages.score.scorer import Scorer
from stages.stage import Work

if TYPE_CHECKING:
    from stages.model.batch import TokenTable


def earlier_commit(work: Work, method: Scorer) -> tuple[Path, Path] | None:
    """Return the tables (tokens, scores) of which a pass over the whole pool may take rows over, or None."""
    if "model" not in method.reads or not method.pointwise() or method.second_pass or method.keeps_features:
        return None
    found = work.earlier()
    if found is None:
        return None
    return found.one("pool_tokens").folder / TABLE_FILE, found.one("scores").folder / TABLE_FILE


def taken_over(tables: tuple[Path, Path] | None, pool: pa.Table, most: int) -> Earlier | None:
    """Open the tables that `earlier_commit` found, for batches of `most` padded tokens of `pool`."""
    if tables is None:
        return None
    from stages.model.batch import TokenTable

    tokens, scores = map(read_table, tables)
    return Earlier(TokenTable(pool), TokenTable(tokens), scores, most)


class Earlier:
    """The batches of an earlier commit, by what stands in them.

    Args:
        pool: the rows now.
        tokens, scores: the rows then, and what they were given.
        most: padded tokens of a batch.
    """

    def __init__(self, pool: TokenTable, tokens: TokenTable, scores: pa.Table, most: int) -> None:
        self._pool, self._tokens, self._scores = pool, tokens, scores
        self._batches: set[bytes] = set()
        rows = np.arange(len(tokens))
        before = np.concatenate([[0], np.cumsum(tokens.lengths, dtype=np.int64)])
        for start, stop in shards(tokens.ids, rows, before, most):
            ids = tokens.ids.slice(start, stop - start).to_pylist()
            for places in batches(ids, tokens.lengths[start:stop].tolist(), most):
                self._batches.add(fingerprint(tokens, [start + place for place in places]))

    def take(self, rows: Sequence[int]) -> list[Outcome] | None:
        """Return the outcomes of a batch of the pool's rows, or None where they must be computed."""
        if fingerprint(self._pool, rows) not in self._batches:
            return None
        found = []
        for row in rows:
            at = self._tokens.index_of(self._pool.ids[row].as_py())
            part = self._scores.slice(at, 1).to_pylist()[0]
            if part["score"] is None or not part["exact"]:
                return None
            loss = np.nan if part["loss"] is None else part["loss"]
            found.append(Outcome(np.array(part["group_scores"], dtype=np.float32), loss))
        return found


def fingerprint(tokens: TokenTable, rows: Sequence[int]) -> bytes:
    """Return a digest of rows in order: their ids, tokens and masks."""
    digest = hashlib.blake2b(digest_size=16)
    for index in rows:
        row = tokens.row(index)
        ids = np.ascontiguousarray(row.input_ids, dtype=np.int64)
        digest.update(f"{row.example_id} {len(ids)} ".encode())
        digest.update(ids.tobytes())
        digest.update(np.packbits(row.answer_mask).tobytes())
    return digest.digest()
