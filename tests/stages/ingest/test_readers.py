"""Files of every kind, whole and broken: the same rows, or a named fault, and never a crash."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import string
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_contracts.errors import InputError
from stages.ingest.readers import read_records
from stages.ingest.records import Record
from stages.ingest.sources import files_of
from tests.stages.ingest.files import answers, chat, jsonl, pool, reasons

ROWS = [{"prompt": f"Question {i}, é\u2028?", "completion": f"Answer {i}", "n": i} for i in range(7)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def read(path: Path, limit: int = 1 << 20) -> list[Record]:
    return list(read_records(path, path.name, limit, lambda count: None, path.parent))


def arrow(stream: bool) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_pylist(ROWS)
    made = pa.ipc.new_stream(sink, table.schema) if stream else pa.ipc.new_file(sink, table.schema)
    with made as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


def csv(delimiter: str) -> bytes:
    lines = [delimiter.join(ROWS[0])] + [
        delimiter.join([f'"{r["prompt"]}"', r["completion"], str(r["n"])]) for r in ROWS
    ]
    return "\r\n".join(lines).encode()


CONTENTS = {
    "a.jsonl": LINES,
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "a.json": json.dumps(ROWS, indent=2).encode(),
    "data.json": json.dumps({"version": "1", "note": ["x", "]"], "data": ROWS}).encode(),
    "lines.json": LINES,
    "a.csv": csv(","),
    "semicolons.csv": csv(";"),
    "a.tsv": csv("\t"),
    "a.parquet": parquet(),
    "stream.arrow": arrow(True),
    "file.arrow": arrow(False),
}
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("name", CONTENTS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str, packed: str) -> None:
    path = tmp_path / f"{name}{packed}"
    path.write_bytes(PACKED[packed](CONTENTS[name]))
    records = read(path)
    assert [record.fault for record in records] == [None] * 7
    assert [record.row for record in records] == [1, 2, 3, 4, 5, 6, 7]
    as_text = [{key: str(value) for key, value in (record.value or {}).items()} for record in records]
    assert as_text == [{key: str(value) for key, value in row.items()} for row in ROWS]


def test_two_gzip_members_and_two_zstandard_frames_are_one_file(tmp_path: Path) -> None:
    for suffix in (".gz", ".zst"):
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(PACKED[suffix](LINES) + PACKED[suffix](LINES))
        assert len(read(path)) == 14


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_a_packed_file_that_breaks_off_keeps_its_rows_and_says_so(tmp_path: Path, suffix: str) -> None:
    rows = [chat(f"Question number {i} of many?", f"answer {i * 7919}") for i in range(3000)]
    data = PACKED[suffix](b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(data[: len(data) // 2] if suffix != ".bz2" else data[:-40])
    jsonl(tmp_path / "b.jsonl", [chat("Q?", "A")])
    work = pool(tmp_path, f"a.jsonl{suffix}", "b.jsonl")
    broken = [row for row in work.rows("quarantine") if row["reason"] in ("corrupt", "bad_json")]
    assert broken
    assert any("to the end" in notice for notice in work.notices)


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_what_stands_before_a_break_in_a_small_packed_file_is_read(suffix: str, tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = [json.dumps({"text": "".join(draw.choices(string.ascii_letters, k=900))}) for _ in range(100)]
    whole = PACKED[suffix]("\n".join(lines).encode())
    (tmp_path / f"a.jsonl{suffix}").write_bytes(whole[: len(whole) * 3 // 4])
    records = read(tmp_path / f"a.jsonl{suffix}")
    used = [record for record in records if record.fault is None]
    assert records[-1].fault.reason == "corrupt"
    least = {".gz": 60, ".zst": 0, ".bz2": 0, ".xz": 60}[suffix]  # the other two unpack by blocks larger than this file
    assert len(used) >= least
    assert [record.value for record in used] == [json.loads(line) for line in lines[: len(used)]]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.json", "a.csv"])
def test_a_file_that_is_not_what_it_says_is_refused_by_itself(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8bnot really" if name.endswith(".gz") else b"\x00\x01\x02nothing of the kind")
    jsonl(tmp_path / "b.jsonl", [chat("Q?", "A")])
    work = pool(tmp_path, name, "b.jsonl")
    assert answers(work) == ["A"]
    assert work.rows("quarantine") or name == "a.csv"
    with pytest.raises(InputError, match="no usable row"):
        pool(tmp_path, name)


BAD_LINES = {
    "bad_json": b'{"prompt": "Q", "completion": ',
    "duplicate_key": b'{"prompt": "Q", "prompt": "R", "completion": "A"}',
    "bad_utf8": b'{"prompt": "Q\xff", "completion": "A"}',
    "not_an_object": b"[1, 2]",
    "nul_byte": b'{"prompt": "Q\\u0000", "completion": "A"}',
    "bad_text": b'{"prompt": "Q\\ud800", "completion": "A"}',
    "too_deep": b'{"prompt": "Q", "completion": "A", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "too_long": b'{"prompt": "' + b"Q" * 300_000 + b'", "completion": "A"}',
    "preference": b'{"prompt": "Q", "chosen": "A", "rejected": "B"}',
    "unknown_format": b'{"foo": 1}',
    "empty_answer": b'{"prompt": "Q", "completion": null}',
    "not_text": b'{"prompt": "Q", "completion": ["A"]}',
}


def test_each_bad_line_is_refused_with_its_reason_and_the_next_is_read(tmp_path: Path) -> None:
    lines = [
        *BAD_LINES.values(),
        b'{"prompt": "Q", "completion": NaN}',
        b'{"prompt": "Q", "completion": "A", "x": 1e999}',
    ]
    lines += [b"\0\0\0", b"", b"   ", json.dumps(chat("Good?", "Yes")).encode()]
    (tmp_path / "pool.jsonl").write_bytes(b"\n".join(lines))
    work = pool(tmp_path, "pool.jsonl", longest_row_bytes=250_000)
    expected = [*BAD_LINES, "bad_json", "bad_json", "bad_json"]
    assert reasons(work) == list(enumerate(expected, start=1))
    refused = {row["reason"]: row for row in work.rows("quarantine")}
    assert refused["duplicate_key"]["field"] == "prompt"
    assert "NUL" in work.rows("quarantine")[-1]["detail"]
    assert "chosen" in refused["preference"]["detail"]
    (kept,) = work.rows("pool")
    assert (kept["row"], answers(work)) == (16, ["Yes"])


def test_a_duplicate_key_is_seen_at_every_depth(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}\n')
    (record,) = read(tmp_path / "p.jsonl")
    assert record.fault is not None
    assert (record.fault.reason, record.fault.field) == ("duplicate_key", "role")


def test_a_huge_row_is_passed_over_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "')
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b'", "completion": "A"}\n' + LINES)
    import tracemalloc

    tracemalloc.start()
    records = read(path, limit=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [record.fault.reason if record.fault else "" for record in records] == ["too_long"] + [""] * 7
    assert peak < 8 << 20


def test_a_json_list_is_read_in_bounded_memory_and_broken_elements_stand_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    row = json.dumps({"prompt": 'say "]}" \\', "completion": "y" * 1000})
    with path.open("w") as file:
        file.write("\n[\n" + ",\n".join([row] * 5000) + ',\n{"prompt": oops},\n' + row + "\n]\n")
    import tracemalloc

    tracemalloc.start()
    faults = [
        (record.row, record.line, record.fault.reason)
        for record in read_records(path, "a", 1 << 20, lambda n: None, tmp_path)
        if record.fault
    ]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert faults == [(5001, 5003, "bad_json")]
    assert peak < 4 << 20


def test_a_json_list_that_breaks_off_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps(ROWS).encode()[:-30])
    records = read(path)
    assert [record.row for record in records] == [1, 2, 3, 4, 5, 6, 7, 0]
    assert records[-1].fault is not None
    assert records[-1].fault.reason == "corrupt"


def test_csv_records_with_missing_cells_bad_bytes_or_doubled_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'prompt,completion\nQ,A\nQ\nQ,A,B\n\nQ\xff,A\n"Q"x,A\nlast,"one\ntwo"')
    records = read(tmp_path / "a.csv")
    assert [(r.row, r.line, r.fault.reason if r.fault else "") for r in records] == [
        (1, 2, ""),
        (2, 3, "bad_csv"),
        (3, 4, "bad_csv"),
        (4, 6, "bad_utf8"),
        (5, 7, "bad_csv"),
        (6, 8, ""),
    ]
    (tmp_path / "b.csv").write_bytes(b"a,a\n1,2\n")
    (record,) = read(tmp_path / "b.csv")
    assert (record.row, record.fault.reason if record.fault else "") == (0, "duplicate_key")


def test_an_open_quote_refuses_a_record_and_not_the_memory(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'prompt,completion\nQ,"open' + b"x,\n" * 100_000)
    records = read(tmp_path / "a.csv", limit=10_000)
    assert records[0].fault is not None
    assert records[0].fault.reason in ("bad_csv", "too_long")


def test_a_utf16_file_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES.decode().encode("utf-16"))
    (record,) = read(tmp_path / "a.jsonl")
    assert record.fault is not None
    assert "UTF-16" in record.fault.detail


def test_a_saved_dataset_a_dictionary_of_them_and_a_folder_are_read(tmp_path: Path) -> None:
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(tmp_path / "both")
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "b.jsonl").write_bytes(LINES)
    (tmp_path / "folder" / "deep" / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    (tmp_path / "folder" / "README.md").write_text("not data")
    for name in ("one", "both", "folder"):
        work = pool(tmp_path, name)
        assert answers(work) == [row["completion"] for row in ROWS]
    assert len(pool(tmp_path, "both/test").rows("pool")) == 1
    assert [source.label for source in files_of(["folder"], tmp_path)] == ["b.jsonl", "a.json.gz"]


def test_names_that_are_nothing_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    datasets.DatasetDict({"a": datasets.Dataset.from_list(ROWS), "b": datasets.Dataset.from_list(ROWS)}).save_to_disk(
        tmp_path / "two"
    )
    for name, words in (
        ("missing.jsonl", "is none of them"),
        ("owner/name", "hub:"),
        ("empty", "no file of a known kind"),
        ("two", "it has a, b"),
        ("hub:a b", "hub:owner/name"),
        ("hub:owner/no-such-dataset", "cannot"),
        ("hub:owner/no-such-dataset@" + "0" * 40, "cannot"),
    ):
        with pytest.raises(InputError) as error:
            pool(tmp_path, name)
        assert words in str(error.value)


def test_labels_are_the_shortest_ends_that_differ(tmp_path: Path) -> None:
    for name in ("a/x/p.jsonl", "b/x/p.jsonl", "q.jsonl"):
        jsonl(tmp_path / name, [chat("Q?", "A")])
    found = files_of(["a", "b/x/p.jsonl", "q.jsonl"], tmp_path)
    assert [source.label for source in found] == ["a/x/p.jsonl", "b/x/p.jsonl", "q.jsonl"]
