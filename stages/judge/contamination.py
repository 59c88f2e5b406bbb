"""Where the rows that were trained on meet the holdout: the `contamination` table.

Streams pool and target past an index of the holdout; only selected rows are compared. The comparison itself is
`text/overlap.py`, and what its findings are worth is a gate's decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from data_contracts.arrow import rows_of
from data_contracts.errors import ArtifactError
from stages.stage import Artifact
from stages.text.overlap import Meeting, OverlapIndex, documents


def selected_ids(selections: Iterable[Artifact]) -> set[str]:
    """Return the ids of every row that any selection trained on."""
    return {
        example_id
        for selection in selections
        for batch in selection.batches()
        for example_id in batch["example_id"].to_pylist()
    }


def meetings_of(holdout: Artifact, trained: Sequence[Artifact], selected: set[str]) -> tuple[list[Meeting], int, int]:
    """Return (meetings sorted by item and row, holdout items, training rows compared).

    Args:
        holdout: an `examples` table.
        trained: the `examples` tables that rows were selected from.
        selected: ids of the rows trained on.

    Raises `ArtifactError` where a selected row is in none of `trained`: it could not be compared.
    """
    index = OverlapIndex(documents(rows_of(holdout.batches())))
    found: list[Meeting] = []
    seen: set[str] = set()
    for document in documents(_rows(trained, selected)):
        if document.id not in seen:  # a row of both pool and target is one row
            seen.add(document.id)
            found += index.meet(document)
    if len(seen) < len(selected):
        raise ArtifactError(
            "every selected row stands in the pool or the target",
            f"{len(selected - seen)} of {len(selected)} do not, such as {min(selected - seen)}",
            "pass the pool, and the target where it was trained on too",
        )
    return sorted(found, key=lambda m: (m.item_id, m.example_id)), len(index), len(seen)


def _rows(tables: Sequence[Artifact], selected: set[str]) -> Iterator[dict[str, object]]:
    for table in tables:
        for row in rows_of(table.batches()):
            if row["example_id"] in selected:
                yield row
