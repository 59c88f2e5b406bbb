"""What ingest says about its work: every row counted, by file and by reason, so that the numbers add up.

read = kept + quarantined for each file and split. A file that broke off counts as one more row, quarantined. Of rows
that a policy changed the first `SHOWN` are named; the rest are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from data_contracts.records import Table
from stages.ingest.records import Record
from stages.text.refusal import Refused

SHOWN = 20
FIRST_REASONS = 3
MOST_FILES = 40
_DETAIL_CHARACTERS = 600
Quarantine = Callable[..., None]


@dataclass
class FileCount:
    """Rows of one file."""

    read: int = 0
    kept: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def refused(self) -> int:
        """Rows in the quarantine."""
        return sum(self.reasons.values())


class Report:
    """Counts rows and writes the quarantine.

    Args:
        quarantine: `Work.quarantine`.
    """

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self.files: dict[tuple[str, str], FileCount] = {}
        self.mended: list[tuple[str, str, int, str, str]] = []
        self.mended_rows = 0
        self.repeated_ids = 0
        self.first: dict[str, list[str]] = {}

    def file(self, split: str, name: str) -> FileCount:
        """Return the counts of one file."""
        return self.files.setdefault((split, name), FileCount())

    def refuse(
        self, split: str, record: Record, fault: Refused, row_id: str = "", example_id: str | None = None
    ) -> None:
        """Put a row in the quarantine and count it."""
        count = self.file(split, record.file)
        count.reasons[fault.reason] += 1
        detail = f"{fault.detail} (id {row_id!r})" if row_id else fault.detail
        first = self.first.setdefault(split, [])
        if len(first) < FIRST_REASONS:
            first.append(f"{place(record, row_id)}: {fault.field + ': ' if fault.field else ''}{fault.detail}")
        self._quarantine(
            split=split,
            file=record.file,
            row=record.row,
            line=record.line,
            example_id=example_id,
            field=clean(fault.field),
            reason=fault.reason,
            detail=clean(detail[:_DETAIL_CHARACTERS]),
        )

    def keep(self, split: str, record: Record, row_id: str, mended: list[str]) -> None:
        """Count a row that is used, and what a policy changed in it."""
        self.file(split, record.file).kept += 1
        self.mended_rows += bool(mended)
        if mended and len(self.mended) < SHOWN:
            self.mended.append((split, record.file, record.row, clean(row_id), "; ".join(mended)))

    def totals(self, split: str) -> FileCount:
        """Return the counts of all files of a split."""
        total = FileCount()
        for (of, _), count in self.files.items():
            if of == split:
                total.read += count.read
                total.kept += count.kept
                total.reasons += count.reasons
        return total

    def tables(self) -> list[Table]:
        """Return the tables of the summary: files, and the rows that a policy changed."""
        rows = [
            (split, name, count.read, count.kept, count.refused, reasons(count))
            for (split, name), count in list(self.files.items())[:MOST_FILES]
        ]
        left = list(self.files.values())[MOST_FILES:]
        if left:
            rest = FileCount(
                sum(c.read for c in left), sum(c.kept for c in left), sum((c.reasons for c in left), Counter())
            )
            rows.append(("", f"{len(left)} more files", rest.read, rest.kept, rest.refused, reasons(rest)))
        columns = ("split", "file", "read", "kept", "quarantined", "by reason")
        tables = [Table(title="Rows by file", columns=columns, rows=tuple(rows))]
        if self.mended:
            title = f"Rows changed by a policy ({self.mended_rows}; the first {len(self.mended)})"
            changes = ("split", "file", "row", "id", "what")
            tables.append(Table(title=title, columns=changes, rows=tuple(self.mended)))
        return tables


def reasons(count: FileCount) -> str:
    """Return reasons and their counts, most frequent first."""
    return ", ".join(f"{name} {rows}" for name, rows in sorted(count.reasons.items(), key=lambda x: (-x[1], x[0])))


def place(record: Record, row_id: str = "") -> str:
    """Return where a row stands, for people: "d1 (row 1 of pool.jsonl)"."""
    if not record.row:
        return record.file
    where = f"line {record.line} of {record.file}" if record.line else f"row {record.row} of {record.file}"
    return clean(f"{row_id} ({where})" if row_id else where)


def clean(text: str) -> str:
    """Return `text` with unpaired surrogates written out, so that it has bytes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
