"""Judging on plain files: an evaluation table through the gates, with training and holdout files where given.

The same gates and the same verdict as in a run. Without both files nothing is compared for contamination, and that
gate, where it is asked for, fails: it is never a silent pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.canonical import file_sha256
from data_contracts.method import resolve
from data_contracts.records import Verdict
from data_contracts.tables import EVALUATION
from stages.judge.evidence import Evidence
from stages.judge.gate import Gate
from stages.judge.verdict import verdict_of
from stages.text.overlap import Document, Meeting, OverlapIndex


def judge_table(
    evaluation: Path,
    gates: Sequence[Mapping[str, Any]],
    *,
    holdout: Iterable[Document] = (),
    training: Iterable[Document] = (),
) -> Verdict:
    """Return the verdict of `gates` on an `evaluation` table.

    Args:
        evaluation: the Arrow stream file, or the folder that holds `data.arrow`.
        gates: method mappings, such as `{method: better_than_base}`.
        holdout, training: documents to look for overlap between.

    A champion counts as given where the table has outcomes of one. Raises `ContractError` for a table that is no
    evaluation, `ArtifactError` for a file that cannot be read.
    """
    chosen = [resolve(Gate, settings, f"judge.gates[{i}]") for i, settings in enumerate(gates)]
    file = evaluation / TABLE_FILE if evaluation.is_dir() else evaluation
    table = read_table(file)
    EVALUATION.validate(table.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)])
    index = OverlapIndex(holdout)
    meetings: list[Meeting] = []
    rows = 0
    for row in training:
        rows += 1
        meetings += index.meet(row)
    models = set(table.column("model").to_pylist())
    evidence = Evidence(table, meetings, len(index), rows, "champion" in models)
    candidate = file_sha256(file) if "candidate" in models else None  # a plain file has no checkpoint: the table's
    return verdict_of(chosen, evidence, candidate=candidate, champion=None)
