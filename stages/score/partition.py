"""Which rows are scored together: the nodes of a fixed binary tree, so that a new row in the pool moves no other.

A node of the tree holds all rows whose keys begin with the same bits; the parts are the largest nodes that fit. What a
part holds follows from the keys below its node alone: a row that is added or taken away changes its own part (which may
be cut in two) and leaves every other as it was, to the byte, since floating-point results depend on the batch's shape.
Shards are parts by example id (a digest, so spread evenly), batches in a shard are parts by length, then by a hash of
the id.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

MOST_ROWS = 2048
BATCHES_A_SHARD = 16
"""A shard is a node of at most this many full batches of tokens: enough rows to sort by length, little to redo."""
WASTE = 8
"""One token of padding is allowed in a batch for so many tokens that a full one holds, however few it holds itself."""


class _Column(Sequence[bytes]):
    """The ids of some rows as bytes, each read when asked for: `bisect` looks at a few."""

    def __init__(self, ids: pa.ChunkedArray, rows: np.ndarray) -> None:
        self._ids, self._rows = ids, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
        return str(self._ids[int(self._rows[index])].as_py()).encode()


def parts(keys: Sequence[bytes], fits: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the largest nodes of the binary tree over sorted `keys` that `fits(start, stop)`.

    Equal keys are never parted: such a node is a part though it does not fit.
    """
    waiting = [(0, len(keys))] if len(keys) else []
    while waiting:
        start, stop = waiting.pop()
        if fits(start, stop):
            yield start, stop
            continue
        low, high = keys[start], keys[stop - 1]
        if low == high:
            yield start, stop
            continue
        middle = bisect_left(keys, _fork(low, high), start, stop)
        waiting += [(middle, stop), (start, middle)]


def _fork(low: bytes, high: bytes) -> bytes:
    """Return the least key of the upper half of the smallest node that holds both; `low` < `high`."""
    for place, byte in enumerate(high):
        before = low[place] if place < len(low) else -1
        if before < 0:  # `low` ends here: what is longer is the upper half
            return high[:place] + b"\x00"
        if before != byte:
            bit = 1 << ((before ^ byte).bit_length() - 1)
            return high[:place] + bytes([byte & ~(bit - 1)])
    raise ValueError("keys are sorted")


def shards(ids: pa.ChunkedArray, rows: np.ndarray, before: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each shard of `rows` (places in the column `ids`, ascending).

    Args:
        before: tokens before each row and, at the end, of all rows.
        most: padded tokens of a batch.
    """

    def fits(start: int, stop: int) -> bool:
        tokens = before[stop] - before[start]
        return stop - start == 1 or bool(tokens <= most * BATCHES_A_SHARD and stop - start <= MOST_ROWS)

    return parts(_Column(ids, rows), fits)


def batches(ids: Sequence[str], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return places in `ids` (each once) of each batch of a shard, the longest rows first.

    A batch's rows times its longest is at most `most` (a longer row stands alone), and little of that is padding.
    """
    keys = [
        int(length).to_bytes(4, "big") + hashlib.blake2b(example_id.encode(), digest_size=8).digest()
        for example_id, length in zip(ids, lengths, strict=True)
    ]
    order = sorted(range(len(ids)), key=lambda index: keys[index])
    total = [0]
    for index in order:
        total.append(total[-1] + int(lengths[index]))

    def fits(start: int, stop: int) -> bool:
        padded = (stop - start) * int(lengths[order[stop - 1]])
        return stop - start == 1 or (padded <= most and (padded - total[stop] + total[start]) * WASTE <= most)

    found = [order[start:stop][::-1] for start, stop in parts([keys[index] for index in order], fits)]
    return found[::-1]
