"""From sorted rows to the tables `examples` and `tokens` of one or more splits, streamed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
import pyarrow as pa

from stages.ingest.spill import SortedSpill
from stages.stage import Work

EXAMPLE_COLUMNS = ("example_id", "source", "file", "row", "messages", "tools", "text", "extra")
SPILLED = pa.schema(
    [
        *((name, pa.int64() if name == "row" else pa.string()) for name in EXAMPLE_COLUMNS),
        ("ids", pa.binary()),  # int32, little-endian
        ("mask", pa.binary()),  # one byte a token
        ("truncated", pa.bool_()),
        ("unit", pa.binary()),  # what may not be parted when the target is cut: a task or a question
    ]
)
Totals = dict[str, dict[str, int]]


def write_splits(
    work: Work,
    spill: SortedSpill,
    outputs: Mapping[str, tuple[str, str | None]],
    placed: Mapping[bytes, str] | None = None,
) -> Totals:
    """Merge the runs into tables; return rows, tokens, answer tokens and truncated rows of each split.

    Args:
        work: opens the outputs.
        spill: rows of the schema `SPILLED`; deleted afterwards.
        outputs: of each split made of these rows, its outputs of examples and of tokens (None: not made).
        placed: the split of each unit; None: all rows are of the only split.
    """
    totals = {split: {"rows": 0, "tokens": 0, "answer_tokens": 0, "truncated": 0} for split in outputs}
    only = next(iter(outputs))
    with ExitStack() as stack:
        writers = {
            split: (stack.enter_context(work.writer(of)), stack.enter_context(work.writer(to)) if to else None)
            for split, (of, to) in outputs.items()
        }
        for row in spill:
            ids, mask, truncated, unit = row[len(EXAMPLE_COLUMNS) :]
            split = placed[unit] if placed is not None else only
            examples, tokens = writers[split]
            total = totals[split]
            examples.append(dict(zip(EXAMPLE_COLUMNS, row, strict=False)))
            total["rows"] += 1
            if tokens is None:
                continue
            ids_T, mask_T = np.frombuffer(ids, np.int32), np.frombuffer(mask, np.bool_)
            answers = int(mask_T.sum())
            total["tokens"] += len(ids_T)
            total["answer_tokens"] += answers
            total["truncated"] += truncated
            tokens.append(
                {
                    "example_id": row[0],
                    "source": row[1],
                    "input_ids": ids_T,
                    "answer_mask": mask_T,
                    "n_tokens": len(ids_T),
                    "n_answer_tokens": answers,
                    "truncated": truncated,
                }
            )
    spill.remove()
    return totals
