"""Shards on disk: the results of some rows of a pass, which outlive a kill.

A shard's file appears whole or not at all; the next attempt on the same identity finds it and scores only what is
missing. One that holds other rows than it should, or cannot be read, is scored again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import uuid4

import numpy as np
import pyarrow as pa

from data_contracts.arrow import read_table, write_table
from data_contracts.errors import ArtifactError
from data_contracts.tables import FEATURES, SCORES
from stages.score.blocks import Outcome, combined

FEATURE = tuple(name for name in FEATURES.schema.names if name != "example_id")
SCHEMA = pa.schema(
    [
        *SCORES.schema,
        pa.field("reason", pa.string(), False),
        pa.field("detail", pa.string(), False),
        *(FEATURES.schema.field(name).with_nullable(True) for name in FEATURE),
    ]
)
"""A row of the scores, why it has none, and its feature."""


@dataclass(frozen=True)
class Shard:
    """Results of the rows from place `start` of a pass; `flops` and `tokens` are what scoring them took.

    `taken` says how many were taken over from an earlier commit.
    """

    start: int
    table: pa.Table
    flops: int
    tokens: int
    taken: int


@dataclass(frozen=True)
class ShardFolder:
    """Where one pass keeps its shards, and how columns become one score."""

    place: Path
    combine: Literal["mean", "max"]

    def write(
        self, start: int, part: pa.Table, outcomes: Sequence[Outcome], *, flops: int, tokens: int, taken: int
    ) -> None:
        """Write one shard's results, whole or not at all; they are not there before `keep`.

        Args:
            part: example_id, source, n_tokens and n_answer_tokens of the shard's rows.
            outcomes: one a row.
        """
        scored = [not outcome.reason for outcome in outcomes]
        table = {
            **{name: part.column(name).to_pylist() for name in part.column_names},
            "score": [
                combined(outcome.columns, self.combine) if ok else None
                for outcome, ok in zip(outcomes, scored, strict=True)
            ],
            "group_scores": [outcome.columns.tolist() for outcome in outcomes],
            "loss": [outcome.loss if np.isfinite(np.float32(outcome.loss)) else None for outcome in outcomes],
            "exact": scored,
            "reason": [outcome.reason for outcome in outcomes],
            "detail": [outcome.detail for outcome in outcomes],
            **{name: [getattr(outcome.feature, name, None) for outcome in outcomes] for name in FEATURE},
        }
        path = self._path(start).with_suffix(".written")
        unfinished = path.with_suffix(f".{uuid4().hex}.unfinished")  # a worker given up for lost may write it too
        spent = {"flops": str(flops), "tokens": str(tokens), "taken": str(taken)}
        write_table(unfinished, SCHEMA.with_metadata(spent), table)
        os.replace(unfinished, path)

    def keep(self, start: int) -> None:
        """Let the shard that was written count from now on, for the next attempt too."""
        path = self._path(start)
        os.replace(path.with_suffix(".written"), path)

    def holds(self, start: int) -> bool:
        """Return whether there is a shard from `start`, whatever is in it."""
        return self._path(start).is_file()

    def read(self, start: int, ids: pa.ChunkedArray) -> Shard | None:
        """Return the shard of these rows, or None where it is unreadable or another and must be scored again."""
        try:
            table = read_table(self._path(start))
        except ArtifactError:
            return None
        if table.schema.names != SCHEMA.names or not table.column("example_id").equals(ids):
            return None
        spent = {key.decode(): int(value) for key, value in (table.schema.metadata or {}).items()}
        return Shard(start, table, **spent)

    def _path(self, start: int) -> Path:
        return self.place / f"{start:012d}.arrow"
