"""Contracts: what a payload promises, checked whole-column at a time.

A `Contract` describes a table: its schema, its key (sorted and unique, proved by order) and its invariants. A
`RecordContract` describes one JSON record of a pydantic type; a `FolderContract` a folder of files such as a model.
Validation streams: it holds one record batch. A violation names contract, column, rule, the first rows and a remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.cost import Frozen
from data_contracts.errors import ContractError

SHOWN_ROWS = 5


@dataclass(frozen=True)
class Violation:
    """One broken rule: which column, which rule, how many rows of how many, and the first of them."""

    contract: str
    column: str
    rule: str
    rows: tuple[int, ...]
    count: int
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(f"row {row}" + (f" ({value})" if value else "") for row, value in self._pairs())
        return f"{self.contract}: column `{self.column}` breaks `{self.rule}` in {self.count} row(s): {shown}"

    def _pairs(self) -> list[tuple[int, str]]:
        return [(row, self.values[i] if i < len(self.values) else "") for i, row in enumerate(self.rows)]


class Invariant:
    """A vectorised rule on one column; `broken` returns a boolean array, True where the rule fails."""

    rule: str

    def __init__(self, column: str) -> None:
        self.column = column

    def broken(self, batch: pa.RecordBatch) -> pa.Array:
        raise TypeError(f"{type(self).__name__} defines no rule")  # pragma: no cover - guarded by the subclasses


class Finite(Invariant):
    """Neither NaN nor infinite; null is allowed where the schema allows it. Reaches into lists."""

    rule = "finite"

    def broken(self, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self.column)
        if pa.types.is_list(column.type):
            bad = pc.invert(pc.is_finite(column.flatten()))
            parents = pc.list_parent_indices(column).filter(pc.fill_null(bad, False))
            return pa.array(_mark(len(column), parents.to_pylist()), pa.bool_())
        return pc.fill_null(pc.invert(pc.is_finite(column)), False)


class Within(Invariant):
    """Between `low` and `high` (either may be None), both included; null passes, NaN is nowhere."""

    def __init__(self, column: str, low: float | None = None, high: float | None = None) -> None:
        super().__init__(column)
        self.low, self.high = low, high
        self.rule = " and ".join(
            part for part in (f">= {low}" if low is not None else "", f"<= {high}" if high is not None else "") if part
        )

    def broken(self, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self.column)
        inside = pa.array([True] * len(column), pa.bool_())
        if self.low is not None:
            inside = pc.and_kleene(inside, pc.greater_equal(column, self.low))
        if self.high is not None:
            inside = pc.and_kleene(inside, pc.less_equal(column, self.high))
        return pc.fill_null(pc.invert(inside), False)


class NotEmpty(Invariant):
    """Text with at least one character, or a list with at least one item."""

    rule = "not empty"

    def broken(self, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self.column)
        length = pc.list_value_length(column) if pa.types.is_list(column.type) else pc.utf8_length(column)
        return pc.fill_null(pc.equal(length, 0), True)


class OneOf(Invariant):
    """One of a fixed set of texts."""

    def __init__(self, column: str, values: Iterable[str]) -> None:
        super().__init__(column)
        self.values = sorted(values)
        self.rule = "one of " + ", ".join(self.values)

    def broken(self, batch: pa.RecordBatch) -> pa.Array:
        return pc.invert(pc.is_in(batch.column(self.column), value_set=pa.array(self.values)))


class LengthIs(Invariant):
    """A list column whose length equals an integer column of the same row."""

    def __init__(self, column: str, length: str) -> None:
        super().__init__(column)
        self.length = length
        self.rule = f"length equals `{length}`"

    def broken(self, batch: pa.RecordBatch) -> pa.Array:
        return pc.fill_null(
            pc.not_equal(pc.list_value_length(batch.column(self.column)), batch.column(self.length)), True
        )


class CountIs(Invariant):
    """A list<bool> column whose number of True equals an integer column of the same row."""

    def __init__(self, column: str, count: str) -> None:
        super().__init__(column)
        self.count = count
        self.rule = f"number of true equals `{count}`"

    def broken(self, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self.column)
        parents = pc.list_parent_indices(column).filter(column.flatten()).to_numpy()
        import numpy as np

        counted = np.bincount(parents, minlength=len(column))
        return pa.array(counted != batch.column(self.count).to_numpy(zero_copy_only=False))


class CodeIs(Invariant):
    """A binary column whose rows hold `bits` for each of `dimensions` numbers, both columns of the same row."""

    def __init__(self, column: str, bits: str, dimensions: str) -> None:
        super().__init__(column)
        self.bits, self.dimensions = bits, dimensions
        self.rule = f"bytes hold `{bits}` bits for each of `{dimensions}` numbers"

    def broken(self, batch: pa.RecordBatch) -> pa.Array:
        numbers = pc.multiply(batch.column(self.bits).cast(pa.int64()), batch.column(self.dimensions))
        return pc.not_equal(pc.binary_length(batch.column(self.column)), pc.divide(pc.add(numbers, 7), 8))


def _mark(length: int, rows: list[int]) -> list[bool]:
    marks = [False] * length
    for row in rows:
        marks[row] = True
    return marks


@dataclass(frozen=True)
class Contract:
    """A table's promise.

    Args:
        name: one word.
        version: raised with every change that a reader could notice.
        schema: Arrow schema with nullability; columns in this order, no others but `extra`.
        extra: columns that may follow those of `schema`, all of them or none; a table without them is as it ever was.
        key: columns that are together strictly increasing from row to row ("" order of text is by code point).
        invariants: rules on columns.
        about: one sentence for people.
    """

    kind: ClassVar[str] = "table"
    name: str
    version: int
    schema: pa.Schema
    key: tuple[str, ...] = ()
    invariants: tuple[Invariant, ...] = ()
    about: str = ""
    least_rows: int = 0
    extra: tuple[pa.Field, ...] = ()

    @property
    def id(self) -> str:
        """The contract's name and version, as it enters digests: "scores/1"."""
        return f"{self.name}/{self.version}"

    @property
    def whole(self) -> pa.Schema:
        """The schema with its extra columns."""
        return pa.schema([*self.schema, *self.extra])

    def validate(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Check every batch and return the number of rows; raises `ContractError` with all violations found."""
        rows, violations = 0, dict[tuple[str, str], Violation]()
        last: tuple[Any, ...] | None = None
        for batch in batches:
            if batch.schema not in (self.schema, self.whole):
                raise self.error([self._schema_violation(batch.schema)])
            try:
                batch.validate(full=True)  # a rule reads wherever an offset points: a bad one ends the process
            except pa.ArrowException as error:
                raise self.error([Violation(self.id, "*", f"sound Arrow data ({error})", (rows,), 1)]) from error
            for name in batch.schema.names:
                if not batch.schema.field(name).nullable and batch.column(name).null_count:
                    self._note(violations, name, "not null", pc.is_null(batch.column(name)), batch, rows)
            for invariant in self.invariants:
                self._note(violations, invariant.column, invariant.rule, invariant.broken(batch), batch, rows)
            if self.key and batch.num_rows:
                bad, last = self._unordered(batch, last)
                self._note(violations, ", ".join(self.key), "sorted and unique", bad, batch, rows)
            rows += batch.num_rows
        if rows < self.least_rows:
            violations["", "rows"] = Violation(self.id, "*", f"at least {self.least_rows} row(s)", (), rows)
        if violations:
            raise self.error(list(violations.values()))
        return rows

    def error(self, violations: list[Violation]) -> ContractError:
        """Return the typed error for `violations`."""
        return ContractError(
            f"the table keeps the contract {self.id}",
            "; ".join(map(str, violations)),
            "mend the rows named (or the stage that wrote them); nothing was committed",
        )

    def _schema_violation(self, found: pa.Schema) -> Violation:
        wanted = self.whole if {field.name for field in self.extra} & set(found.names) else self.schema
        missing = [n for n in wanted.names if n not in found.names]
        extra = [n for n in found.names if n not in wanted.names]
        wrong = [
            f"{n}: {found.field(n).type}, not {wanted.field(n).type}"
            for n in wanted.names
            if n in found.names and found.field(n) != wanted.field(n)
        ]
        text = f"schema (missing {missing or 'none'}, unknown {extra or 'none'}, wrong {wrong or 'none'})"
        return Violation(self.id, "*", text, (), 0)

    def _note(
        self,
        found: dict[tuple[str, str], Violation],
        column: str,
        rule: str,
        bad: pa.Array,
        batch: pa.RecordBatch,
        at: int,
    ) -> None:
        count = pc.sum(bad).as_py() or 0
        if not count:
            return
        first = pc.indices_nonzero(bad)[:SHOWN_ROWS].to_pylist()
        known = found.get((column, rule))
        if known is not None:
            found[column, rule] = Violation(self.id, column, rule, known.rows, known.count + count, known.values)
            return
        lead = column.split(", ", maxsplit=1)[0]
        values = tuple(repr(batch.column(lead)[row].as_py())[:60] for row in first)
        found[column, rule] = Violation(self.id, column, rule, tuple(at + row for row in first), count, values)

    def _unordered(self, batch: pa.RecordBatch, last: tuple[Any, ...] | None) -> tuple[pa.Array, tuple[Any, ...]]:
        """Mark rows whose key is not above the row before; the first row is compared with `last`."""
        count = batch.num_rows
        above = pa.array([False] * (count - 1), pa.bool_())
        equal = pa.array([True] * (count - 1), pa.bool_())
        for name in self.key:
            column = batch.column(name)
            before, after = column.slice(0, count - 1), column.slice(1)
            above = pc.or_(above, pc.and_(equal, pc.greater(after, before)))
            equal = pc.and_(equal, pc.equal(after, before))
        first = tuple(batch.column(name)[0].as_py() for name in self.key)
        below = last is not None and None not in (*first, *last) and not first > last  # a null is reported as a null
        head = pa.array([below])
        ends = tuple(batch.column(name)[count - 1].as_py() for name in self.key)
        return pa.concat_arrays([head, pc.invert(above)]), ends


@dataclass(frozen=True)
class RecordContract:
    """One JSON record of a pydantic type, stored as `record.json`."""

    kind: ClassVar[str] = "record"
    name: str
    version: int
    type: type[Frozen]
    about: str = ""

    @property
    def id(self) -> str:
        """The contract's name and version."""
        return f"{self.name}/{self.version}"


@dataclass(frozen=True)
class FolderContract:
    """A folder of files, of which some must be there; `suffixes` are the only file endings allowed."""

    kind: ClassVar[str] = "folder"
    name: str
    version: int
    needs: tuple[str, ...]
    suffixes: tuple[str, ...] = field(default=(".json", ".safetensors", ".txt", ".jinja", ".model", ".md"))
    about: str = ""

    @property
    def id(self) -> str:
        """The contract's name and version."""
        return f"{self.name}/{self.version}"


AnyContract = Contract | RecordContract | FolderContract
