"""Validation finds exactly the rows that a plain loop finds, in any batching, and says where they are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.contract import CodeIs, Contract, CountIs, Finite, LengthIs, NotEmpty, OneOf, Violation, Within
from data_contracts.errors import ContractError

LIST = pa.list_(pa.field("item", pa.float64(), False))
MASK = pa.list_(pa.field("item", pa.bool_(), False))
SCHEMA = pa.schema(
    [
        pa.field("k", pa.string(), False),
        pa.field("x", pa.float64(), True),
        pa.field("xs", LIST, True),
        pa.field("mask", MASK, False),
        pa.field("n", pa.int32(), False),
        pa.field("c", pa.string(), False),
        pa.field("code", pa.binary(), False),
        pa.field("bits", pa.int8(), False),
    ]
)
FLOATS = st.floats(-3, 3) | st.sampled_from([math.nan, math.inf, -math.inf])
ROW = st.fixed_dictionaries(
    {
        "k": st.text(st.characters(codec="utf-8"), max_size=2),
        "x": st.none() | FLOATS,
        "xs": st.none() | st.lists(FLOATS, max_size=2),
        "mask": st.lists(st.booleans(), max_size=3),
        "n": st.integers(0, 3),
        "c": st.sampled_from(["", "a", "b", "z"]),
        "code": st.binary(max_size=4),
        "bits": st.sampled_from([1, 4, 8]),
    }
)


def finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


RULES = {
    "finite": (Finite("x"), lambda row: finite(row["x"])),
    "finite list": (Finite("xs"), lambda row: all(map(finite, row["xs"] or []))),
    "within": (Within("x", -1, 2), lambda row: row["x"] is None or -1 <= row["x"] <= 2),
    "at least": (Within("n", 1), lambda row: row["n"] >= 1),
    "at most": (Within("x", high=0.5), lambda row: row["x"] is None or row["x"] <= 0.5),
    "not empty": (NotEmpty("c"), lambda row: row["c"] != ""),
    "not empty list": (NotEmpty("mask"), lambda row: len(row["mask"]) > 0),
    "one of": (OneOf("c", ["a", "b"]), lambda row: row["c"] in ("a", "b")),
    "length": (LengthIs("mask", "n"), lambda row: len(row["mask"]) == row["n"]),
    "count": (CountIs("mask", "n"), lambda row: sum(row["mask"]) == row["n"]),
    "code": (CodeIs("code", "bits", "n"), lambda row: len(row["code"]) == math.ceil(row["bits"] * row["n"] / 8)),
}


def batches(rows: list[dict[str, Any]], cuts: list[int]) -> list[pa.RecordBatch]:
    """Return the rows as batches that are slices of one larger batch, so that offsets are not zero."""
    whole = pa.RecordBatch.from_arrays([pa.array([row[f.name] for row in rows], f.type) for f in SCHEMA], schema=SCHEMA)
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    return [whole.slice(a, b - a) for a, b in itertools.pairwise(edges)]


def broken(contract: Contract, found: list[pa.RecordBatch]) -> dict[str, int]:
    """Return rule → number of rows as the validation reports it."""
    seen: list[Violation] = []

    class Seen(Contract):
        def error(self, violations: list[Violation]) -> ContractError:
            seen.extend(violations)
            return super().error(violations)

    spy = Seen(
        contract.name, contract.version, contract.schema, contract.key, contract.invariants, "", contract.least_rows
    )
    try:
        spy.validate(found)
    except ContractError:
        return {violation.rule: violation.count for violation in seen}
    return {}


@pytest.mark.parametrize("name", sorted(RULES))
@given(rows=st.lists(ROW, max_size=8), cuts=st.lists(st.integers(0, 8), max_size=3))
def test_each_rule_finds_what_a_plain_loop_finds(name: str, rows: list[dict[str, Any]], cuts: list[int]) -> None:
    rule, keeps = RULES[name]
    bad = sum(not keeps(row) for row in rows)
    contract = Contract("toy", 1, SCHEMA, invariants=(rule,))
    assert broken(contract, batches(rows, cuts)) == ({rule.rule: bad} if bad else {})


@given(rows=st.lists(ROW, max_size=8), cuts=st.lists(st.integers(0, 8), max_size=3))
def test_a_key_is_strictly_increasing_over_batch_borders(rows: list[dict[str, Any]], cuts: list[int]) -> None:
    rows = sorted(rows, key=lambda row: (row["k"], row["n"])) if len(rows) % 2 else rows
    bad = sum(not (b["k"], b["n"]) > (a["k"], a["n"]) for a, b in itertools.pairwise(rows))
    found = broken(Contract("toy", 1, SCHEMA, key=("k", "n")), batches(rows, cuts))
    assert found == ({"sorted and unique": bad} if bad else {})


def toy(**columns: list[Any]) -> pa.RecordBatch:
    rows = len(next(iter(columns.values())))
    default: dict[str, list[Any]] = {
        "k": [f"{i:03d}" for i in range(rows)],
        "x": [0.0] * rows,
        "xs": [[]] * rows,
        "mask": [[]] * rows,
        "n": [0] * rows,
        "c": ["a"] * rows,
        "code": [b""] * rows,
        "bits": [1] * rows,
    }
    arrays = [pa.array({**default, **columns}[f.name], f.type) for f in SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def test_a_violation_names_contract_column_rule_and_the_first_rows_of_the_whole_table() -> None:
    contract = Contract("toy", 3, SCHEMA, invariants=(Within("x", 0),))
    good, bad = toy(x=[1.0] * 4), toy(x=[1.0, -1.0, 1.0, -2.0])
    with pytest.raises(ContractError) as caught:
        contract.validate([good, bad])
    assert "toy/3" in caught.value.found
    assert "`x`" in caught.value.found
    assert "2 row(s)" in caught.value.found
    assert "row 5 (-1.0), row 7 (-2.0)" in caught.value.found


def test_a_null_where_none_may_be_is_a_violation_even_in_the_key() -> None:
    contract = Contract("toy", 1, SCHEMA, key=("k",))
    for keys in (["a", None, "b"], [None, "a"], ["a", None], [None]):
        with pytest.raises(ContractError, match="not null"):
            contract.validate([toy(k=keys), toy(k=["c"])])


def test_another_schema_is_named_column_by_column() -> None:
    contract = Contract("toy", 1, SCHEMA)
    other = pa.RecordBatch.from_pydict({"k": ["a"], "x": [1], "extra": [1]})
    with pytest.raises(ContractError) as caught:
        contract.validate([other])
    for part in ("missing ['xs', 'mask', 'n', 'c', 'code', 'bits']", "unknown ['extra']", "x: int64, not double"):
        assert part in caught.value.found


def test_a_table_with_too_few_rows_is_refused_and_rows_are_counted() -> None:
    contract = Contract("toy", 1, SCHEMA, least_rows=3)
    assert contract.validate([toy(n=[0, 0]), toy(n=[0])]) == 3
    with pytest.raises(ContractError, match="at least 3"):
        contract.validate([toy(n=[0, 0])])
    with pytest.raises(ContractError, match="at least 3"):
        contract.validate([])


def test_extra_columns_are_all_there_or_none_and_what_they_hold_is_checked():
    contract = Contract(
        "t",
        1,
        pa.schema([pa.field("k", pa.int64(), False)]),
        key=("k",),
        extra=(pa.field("a", pa.float64(), True), pa.field("b", pa.int32(), False)),
    )

    def batch(*names: str) -> pa.RecordBatch:
        values = {"k": pa.array([1, 2]), "a": pa.array([0.5, None]), "b": pa.array([1, 2], pa.int32())}
        schema = pa.schema([contract.whole.field(name) for name in names])
        return pa.RecordBatch.from_arrays([values[name] for name in names], schema=schema)

    assert contract.validate([batch("k")]) == contract.validate([batch("k", "a", "b")]) == 2
    for names in (("k", "a"), ("k", "b", "a"), ("a", "k", "b")):
        with pytest.raises(ContractError, match="schema"):
            contract.validate([batch(*names)])
    with pytest.raises(ContractError, match=r"missing \['b'\]"):
        contract.validate([batch("k", "a")])
    broken = pa.RecordBatch.from_arrays(
        [pa.array([1, 2]), pa.array([0.5, 1.0]), pa.array([1, None], pa.int32())], schema=contract.whole
    )
    with pytest.raises(ContractError, match="`b` breaks `not null`"):
        contract.validate([broken])
