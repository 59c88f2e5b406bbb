"""Shards: stretches of the pool whose results outlive a kill.

A shard is a contiguous range of rows, bounded by tokens, so that what a killed attempt loses is bounded by work. Its
file appears whole or not at all; the next attempt on the same identity finds it and scores only what is missing.
Batches never cross a shard, so the bytes do not depend on where an attempt was killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from data_contracts.arrow import read_table, write_table
from data_contracts.errors import ArtifactError
from data_contracts.tables import FEATURES, SCORES
from stages.score.blocks import Outcome, combined

MOST_ROWS = 2048
BATCHES_A_SHARD = 8
"""A shard ends at this many full batches: enough rows to sort by length, little enough to redo."""

SCHEMA = pa.schema(
    [
        *SCORES.schema,
        pa.field("reason", pa.string(), False),
        pa.field("detail", pa.string(), False),
        *(field.with_nullable(True) for field in FEATURES.schema if field.name != "example_id"),
    ]
)
"""A row of the scores, why it has none, and its feature."""


@dataclass(frozen=True)
class Shard:
    """Rows `start` to `stop` (excluded) of the pool; `flops` and `tokens` are what scoring them took."""

    start: int
    stop: int
    table: pa.Table
    flops: int
    tokens: int


def boundaries(lengths_N: np.ndarray, batch_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each shard: at most `MOST_ROWS` rows and about `BATCHES_A_SHARD` batches of tokens."""
    start, held, most = 0, 0, batch_tokens * BATCHES_A_SHARD
    for index, length in enumerate(lengths_N):
        if index > start and (held + int(length) > most or index - start >= MOST_ROWS):
            yield start, index
            start, held = index, 0
        held += int(length)
    if len(lengths_N):
        yield start, len(lengths_N)


def write_shard(
    folder: Path,
    start: int,
    columns: dict[str, Sequence[object]],
    outcomes: Sequence[Outcome],
    *,
    combine: Literal["mean", "max"],
    flops: int,
    tokens: int,
) -> None:
    """Write one shard's results, whole or not at all.

    Args:
        columns: example_id, source, n_tokens and n_answer_tokens of the shard's rows.
        outcomes: one a row.
    """
    scored = [not outcome.reason for outcome in outcomes]
    table = {
        **columns,
        "score": [combined(o.columns, combine) if ok else None for o, ok in zip(outcomes, scored, strict=True)],
        "group_scores": [outcome.columns.tolist() for outcome in outcomes],
        "loss": [outcome.loss if np.isfinite(np.float32(outcome.loss)) else None for outcome in outcomes],
        "exact": scored,
        "reason": [outcome.reason for outcome in outcomes],
        "detail": [outcome.detail for outcome in outcomes],
        **{
            name: [getattr(outcome.feature, name, None) for outcome in outcomes]
            for name in FEATURES.schema.names
            if name != "example_id"
        },
    }
    path = _path(folder, start)
    unfinished = path.with_suffix(".unfinished")
    write_table(unfinished, SCHEMA.with_metadata({"flops": str(flops), "tokens": str(tokens)}), table)
    os.replace(unfinished, path)


def read_shard(folder: Path, start: int, stop: int) -> Shard | None:
    """Return the shard of these rows, or None where it is missing or unreadable and must be scored again."""
    path = _path(folder, start)
    if not path.is_file():
        return None
    try:
        table = read_table(path)
    except ArtifactError:
        return None
    if table.num_rows != stop - start or table.schema.names != SCHEMA.names:
        return None
    recorded = table.schema.metadata or {}
    return Shard(start, stop, table, int(recorded[b"flops"]), int(recorded[b"tokens"]))


def _path(folder: Path, start: int) -> Path:
    return folder / "shards" / f"{start:012d}.arrow"
