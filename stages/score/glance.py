"""A glance at a row: the beginning of its answer with the few tokens before it, in place of the whole row.

What a model says about an answer depends mostly on the answer and on what stands next to it, and prompts are long: a
glance costs a fraction of the row. It shows where a scorer's numbers will lie at this checkpoint, which nothing stored
at an earlier one does as well (docs/scoring.md has the figures).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from stages.model.batch import Row

LEAST_CONTEXT = 4
WHOLE = 2**30
"""An answer of any length."""


@dataclass(frozen=True)
class Glance:
    """At most `context` tokens before the first supervised one, and at most `answer` tokens from there on."""

    context: int
    answer: int

    def lengths(self, first_N: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
        """Return how many tokens of each row are looked at, int32."""
        seen_N = np.minimum(first_N, self.context) + np.minimum(lengths_N - first_N, self.answer)
        return np.asarray(seen_N, dtype=np.int32)

    def of(self, row: Row) -> Row:
        """Return the part of a row that is looked at."""
        from stages.model.batch import Row

        first = int(np.argmax(row.answer_mask))
        part = slice(max(0, first - self.context), first + self.answer)
        return Row(row.example_id, row.input_ids[part], row.answer_mask[part], row.weight)


def widest(first_N: np.ndarray, lengths_N: np.ndarray, share: float) -> Glance:
    """Return the widest glance at no more than `share` of all tokens: whole answers first, then what stands before.

    Where whole answers are too much, their beginnings after `LEAST_CONTEXT` tokens; one token of each at the least.
    """
    allowed = share * float(lengths_N.sum(dtype=np.int64))

    def fits(glance: Glance) -> bool:
        return float(glance.lengths(first_N, lengths_N).sum(dtype=np.int64)) <= allowed

    longest = int(lengths_N.max())
    if fits(Glance(LEAST_CONTEXT, WHOLE)):
        return Glance(_largest(LEAST_CONTEXT, longest, lambda size: fits(Glance(size, WHOLE))), WHOLE)
    return Glance(LEAST_CONTEXT, _largest(1, longest, lambda size: fits(Glance(LEAST_CONTEXT, size))))


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number from `low` to `high` for which `holds`, which is monotone; `low` where none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def first_answers(tokens: pa.Table) -> np.ndarray:
    """Return the place of each row's first supervised token, int32; a table of one batch at a time in memory."""
    found = []
    for batch in tokens.select(["answer_mask"]).to_batches():
        column = batch.column(0)
        offsets_n = column.offsets.to_numpy()
        start, stop = int(offsets_n[0]), int(offsets_n[-1])
        mask = column.values.slice(start, stop - start).to_numpy(zero_copy_only=False)
        true = np.flatnonzero(mask) + start
        place_n = true[np.searchsorted(true, offsets_n[:-1])] - offsets_n[:-1]
        found.append(place_n.astype(np.int32))
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int32)
