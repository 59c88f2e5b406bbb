"""Whatever bytes or values stand in a file: every row is kept or refused with a reason, and nothing else is raised."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_contracts.config import IngestConfig
from data_contracts.errors import InputError
from stages.ingest.formats import NAMES
from stages.ingest.turns import KNOWN_NAMES
from tests.local_work import LocalWork
from tests.stages.ingest.files import GIVES, chat, ingest_files

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(sorted({name for names in NAMES.values() for name in names} | {"chosen", "rejected", "label"}))
TURNS = st.dictionaries(
    st.sampled_from(["role", "from", "content", "value", "tool_calls", "train", "weight", "name"]),
    VALUES | st.sampled_from(sorted(KNOWN_NAMES)),
    max_size=4,
)
ROWS = st.dictionaries(KEYS | st.text(max_size=5), VALUES | st.lists(TURNS, max_size=3), max_size=4)


def check(folder: Path, name: str, data: bytes, rows: int | None = None) -> None:
    """Ingest `data` beside one good file, and check that every row is counted once."""
    number = len(list(folder.iterdir()))
    place = folder / f"case-{number}"
    place.mkdir()
    (place / name).write_bytes(data)
    (place / "good.jsonl").write_text(json.dumps(chat("A good question?", "A good answer.")) + "\n")
    work = LocalWork(place / "work", GIVES)
    summary = ingest_files(
        [name, "good.jsonl"], model=None, settings=IngestConfig(longest_row_bytes=100_000), work=work, root=place
    )
    facts = summary.facts
    kept, refused = work.rows("pool"), work.rows("quarantine")
    assert facts["rows read"] == len(kept) + len(refused)
    assert rows is None or facts["rows read"] == rows + 1
    assert len({(row["file"], row["row"]) for row in kept + refused}) == len(kept) + len(refused)


@QUIET
@given(
    data=st.binary(max_size=200),
    name=st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.arrow", "a.txt"]),
)
def test_any_bytes(tmp_path: Path, name: str, data: bytes) -> None:
    check(tmp_path, name, data)
    check(tmp_path, name, b"\x28\xb5\x2f\xfd" + data)
    check(tmp_path, f"{name}.gz", gzip.compress(data, mtime=0))


@QUIET
@given(
    data=st.text(alphabet='{}[]",:\\ \n0naA\r\u2028', max_size=80), name=st.sampled_from(["a.jsonl", "a.json", "a.csv"])
)
def test_text_that_is_nearly_json(tmp_path: Path, name: str, data: str) -> None:
    check(tmp_path, name, data.encode())
    check(tmp_path, name, b'{"data": [' + data.encode())


@QUIET
@given(rows=st.lists(ROWS, min_size=1, max_size=5))
def test_any_values_as_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    check(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode(), len(rows))
    check(tmp_path, "a.json", json.dumps(rows).encode(), len(rows))


@pytest.mark.parametrize(
    "settings", [{"format": name} for name in ("prompt", "alpaca", "messages", "sharegpt", "text")]
)
@QUIET
@given(rows=st.lists(ROWS, min_size=1, max_size=5))
def test_any_values_as_rows_of_a_given_format(
    tmp_path: Path, settings: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    number = len(list(tmp_path.iterdir()))
    (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = LocalWork(tmp_path / f"work-{number}", GIVES)
    try:
        ingest_files([f"{number}.jsonl"], model=None, settings=IngestConfig(**settings), work=work, root=tmp_path)
    except InputError:
        assert len(work.quarantined) == len(rows)
        return
    assert len(work.rows("pool")) + len(work.rows("quarantine")) == len(rows)
