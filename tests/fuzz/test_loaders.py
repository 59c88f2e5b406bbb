"""Requests, configurations, tables and records from outside: whatever stands in them, a value or a typed error."""

from __future__ import annotations

import io
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_contracts.config import Config
from data_contracts.contract import Contract
from data_contracts.records import Request
from tests.conftest import ROOT
from tests.fuzz.loaders import LOADERS, SEEDS, TABLES

QUIET = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["method", "../..", "\0", "sqlite:///x", "http://u:p@h", "1e999", "2001-13-01", "influence"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6) | st.sampled_from(["method", "path", "seed"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def mutations(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """Return seeds with a few spans replaced, cut or doubled."""

    @st.composite
    def mutate(draw: st.DrawFn) -> bytes:
        data = draw(st.sampled_from(seeds))
        for _ in range(draw(st.integers(0, 4))):
            start = draw(st.integers(0, len(data)))
            end = draw(st.integers(start, min(len(data), start + 16)))
            data = data[:start] + draw(st.binary(max_size=8) | st.just(data[start:end] * 2)) + data[end:]
        return data

    return mutate()


@pytest.mark.parametrize("name", sorted(LOADERS))
@QUIET
@given(data=st.data())
def test_any_bytes_and_any_mutation_of_a_good_file(name: str, data: st.DataObject) -> None:
    LOADERS[name](data.draw(mutations(SEEDS[name]) | st.binary(max_size=300)))


@QUIET
@given(values=st.dictionaries(st.sampled_from(sorted(Config.model_fields)), VALUES, max_size=6))
def test_any_values_in_a_configuration(values: dict[str, object]) -> None:
    base = {"model": {"path": "m"}, "data": {"pool": "p", "target": "t"}}
    LOADERS["config"](yaml.safe_dump({**base, **values}, allow_unicode=True).encode("utf-8", "surrogatepass"))


@QUIET
@given(values=st.fixed_dictionaries({}, optional=dict.fromkeys(Request.model_fields, VALUES)))
def test_any_values_in_a_request(values: dict[str, object]) -> None:
    import json

    base = {"verb": "score", "store": {"tracking_uri": "sqlite:///a.db", "work_uri": "w"}}
    LOADERS["request"](json.dumps({**base, **values}).encode("utf-8", "surrogatepass"))


def rows_of(contract: Contract, count: int, seed: int) -> bytes:
    """Return a stream file of `count` random rows under the contract's schema."""
    draw = np.random.default_rng(seed)

    def array(kind: pa.DataType) -> pa.Array:
        if pa.types.is_list(kind):
            lengths = draw.integers(0, 4, count)
            inner = array_of(kind.value_type, int(lengths.sum()))
            return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int32()), inner)
        return array_of(kind, count)

    def array_of(kind: pa.DataType, size: int) -> pa.Array:
        if pa.types.is_string(kind):
            return pa.array([str(number) for number in draw.integers(0, 99, size)], kind)
        if pa.types.is_binary(kind):
            return pa.array([draw.bytes(8) for _ in range(size)], kind)
        return pa.array(draw.integers(0, 2, size)).cast(kind)

    sink = io.BytesIO()
    batch = pa.RecordBatch.from_arrays(
        [array(field.type).cast(field.type) for field in contract.schema], schema=contract.schema
    )
    with pa.ipc.new_stream(sink, contract.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


@pytest.mark.parametrize("contract", TABLES, ids=lambda contract: contract.name)
def test_flipped_bytes_in_a_table_with_rows_end_no_process(contract: Contract) -> None:
    whole = rows_of(contract, 12, 0)
    draw = np.random.default_rng(1)
    for _ in range(150):
        broken = bytearray(whole)
        for place in draw.integers(0, len(whole), draw.integers(1, 5)):
            broken[place] = draw.integers(0, 256)
        LOADERS["table"](bytes(broken))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LOADERS))
def test_a_search_by_coverage_for_a_bounded_time_finds_nothing(name: str) -> None:
    if find_spec("atheris") is None:
        pytest.skip("needs atheris, which has no build for this Python or machine")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.loaders", name, "8"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done" in done.stderr, done.stderr[-2000:]
