"""The rows a segment writes, in chunks that survive a kill.

Rows gather in memory between snapshots; a snapshot writes them as one chunk a table and lists the chunks that belong to
it. A resumed segment reads the listed chunks and writes the rest again, so the tables come out as if never interrupted.
Only rank 0 keeps rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_contracts.arrow import read_table, write_table
from data_contracts.tables import CURVE, EXAMPLE_CHOICES, EXAMPLE_INFLUENCE, EXAMPLE_LOSSES, VALIDATION_LOSSES

TIMING = pa.schema(
    [
        pa.field("step", pa.int64(), False),
        pa.field("what", pa.string(), False),  # step, evaluation, direction or choice
        pa.field("seconds", pa.float64(), False),
        pa.field("tokens", pa.int64(), False),
        pa.field("peak_bytes", pa.int64(), False),
    ]
)
CHOICES = pa.schema(
    [
        pa.field("step", pa.int64(), False),
        pa.field("action", pa.string(), False),  # continue, anneal or end
        pa.field("reason", pa.string(), False),
    ]
)
SCHEMAS = {
    "curve": CURVE.whole,  # what it is published with is asked for there
    "validation_losses": VALIDATION_LOSSES.schema,
    "retention_losses": VALIDATION_LOSSES.schema,
    "example_losses": EXAMPLE_LOSSES.schema,
    "example_influence": EXAMPLE_INFLUENCE.schema,
    "example_choices": EXAMPLE_CHOICES.schema,
    "timing": TIMING,
    "choices": CHOICES,
}


class Rows:
    """Append rows to the tables of a segment.

    Args:
        folder: where chunks go.
        chunks: file names, in order, of the chunks that a snapshot listed; others are left over and ignored.
    """

    def __init__(self, folder: Path, chunks: Sequence[str] = ()) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.chunks = list(chunks)
        self._waiting: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
        self.curve: list[dict[str, Any]] = [
            row for name in self.chunks if name.startswith("curve-") for row in read_table(folder / name).to_pylist()
        ]

    def add(self, table: str, row: dict[str, Any]) -> None:
        """Append one row."""
        self._waiting[table].append(row)
        if table == "curve":
            self.curve.append(row)

    def flush(self, step: int) -> list[str]:
        """Write what is waiting as chunks named for `step` and return the names of all chunks so far."""
        for table, rows in self._waiting.items():
            if rows:
                name = f"{table}-{step:09d}.arrow"
                write_table(self._folder / f".{name}", SCHEMAS[table], pa.Table.from_pylist(rows, SCHEMAS[table]))
                os.replace(self._folder / f".{name}", self._folder / name)
                self.chunks.append(name)
        self._waiting = {name: [] for name in SCHEMAS}
        return list(self.chunks)


def read_chunks(folder: Path, chunks: Sequence[str], table: str) -> Iterator[pa.Table]:
    """Yield the listed chunks of one table in order."""
    for name in chunks:
        if name.startswith(f"{table}-"):
            yield read_table(folder / name)
