"""Splits share nothing: duplicates, leaks, tasks, and what is cut from the target."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from data_contracts.errors import ConfigError, InputError
from stages.ingest.cut import cut
from tests.local_work import LocalWork
from tests.stages.ingest.files import answers, chat, jsonl, pool, reasons, stage

pytestmark = pytest.mark.shared
LONG = " ".join(f"word{i}" for i in range(60))


@pytest.fixture
def model(shared: Path) -> Path:
    return shared / "data" / "stories260k"


def questions(work: LocalWork, split: str) -> list[str]:
    return sorted(json.loads(row["messages"])[0]["content"] for row in work.rows(split))


def test_pool_rows_that_stand_in_another_split_are_leaks(tmp_path: Path, model: Path) -> None:
    jsonl(tmp_path / "target.jsonl", [chat(f"Target {i}?", f"t{i}") for i in range(4)])
    jsonl(tmp_path / "validation.jsonl", [chat("Boiling point of water in C?", "100.")])
    jsonl(tmp_path / "holdout.jsonl", [chat("Largest planet?", "Jupiter."), chat("Say it", LONG)])
    rows = [
        chat("largest  planet?", "JUPITER. "),  # case and space
        chat("Largest planet?", "Saturn, surely."),  # the question with another answer
        chat("Boiling point of water in C?", "100.", doc_id=0),  # an extra field
        chat("Target 2?", "t2"),
        chat("Say it", LONG.replace("word30", "other")),
        chat("Smallest planet?", "Mercury."),
    ]
    jsonl(tmp_path / "pool.jsonl", rows)
    data = {name: f"{name}.jsonl" for name in ("pool", "target", "validation", "holdout")}
    work, _ = stage(tmp_path, model, data)
    assert questions(work, "pool") == ["Smallest planet?"]
    refused = [row for row in work.rows("quarantine") if row["split"] == "pool"]
    assert [row["reason"] for row in refused] == ["leak"] * 5
    for row, words in zip(refused, ("holdout", "holdout", "validation", "target", "holdout"), strict=True):
        assert words in row["detail"]


def test_what_must_not_be_forgotten_is_trained_on_by_no_split(tmp_path: Path, model: Path) -> None:
    jsonl(tmp_path / "validation.jsonl", [chat("V?", "v", task="v")])
    jsonl(tmp_path / "holdout.jsonl", [chat("H?", "h", task="h")])
    kept = [chat("Capital of Peru?", "Lima.", task="capitals"), chat("Say it", LONG, task="r")]
    jsonl(tmp_path / "retention.jsonl", [*kept, chat("v?", "V", task="r"), chat("H?", "no", task="r"), kept[1]])
    jsonl(tmp_path / "target.jsonl", [chat("T?", "t", task="t"), chat("capital of PERU?", "lima.", task="t")])
    rows = [
        chat("Capital of Peru?", "It is Lima.", task="p"),  # the question with another answer
        chat("Capital of Chile?", "Santiago.", task="capitals"),  # its task
        chat("Say it", LONG.replace("word30", "other"), task="p"),  # a near copy
        chat("Free?", "yes", task="p"),
    ]
    jsonl(tmp_path / "pool.jsonl", rows)
    data = {name: f"{name}.jsonl" for name in ("pool", "target", "validation", "holdout", "retention")}
    work, summary = stage(tmp_path, model, data, task_field="task")
    assert questions(work, "retention") == ["Capital of Peru?", "Say it"]
    assert [row["example_id"] for row in work.rows("retention_tokens")] == [
        row["example_id"] for row in work.rows("retention")
    ]
    assert (questions(work, "target"), questions(work, "pool")) == (["T?"], ["Free?"])
    told = [(row["split"], row["reason"]) for row in work.rows("quarantine")]
    assert sorted(told) == [("pool", "leak")] * 3 + [("retention", "duplicate")] + [("retention", "leak")] * 2 + [
        ("target", "leak")
    ]
    assert all("retention" in row["detail"] for row in work.rows("quarantine") if row["split"] in ("pool", "target"))
    assert (summary.facts["retention rows"], summary.facts["rows read"]) == (2, 13)
    without, told = stage(tmp_path, model, {name: data[name] for name in data if name != "retention"})
    assert not {"retention", "retention_tokens"} & set(without.opened)
    assert "retention rows" not in told.facts


def test_a_near_copy_of_a_held_out_row_is_a_leak(tmp_path: Path, model: Path) -> None:
    jsonl(
        tmp_path / "t.jsonl",
        [chat(f"Tell {i}", f"{i} {LONG}") for i in range(1)] + [chat(f"T{i}", f"{i}") for i in range(9)],
    )
    jsonl(tmp_path / "p.jsonl", [chat("Tell 0", f"0 {LONG} indeed"), {"text": f"{LONG} x"}, chat("Other", "one")])
    work, _ = stage(tmp_path, model, {"pool": "p.jsonl", "target": "t.jsonl"})
    assert reasons(work)[0] == (1, "leak")
    assert len(work.rows("pool")) == 2


def test_a_target_row_that_is_evaluated_is_no_target(tmp_path: Path, model: Path) -> None:
    jsonl(tmp_path / "h.jsonl", [chat("Q1?", "A")])
    jsonl(tmp_path / "t.jsonl", [chat("q1?", "a"), chat("Q2?", "A"), chat("Q3?", "A")])
    jsonl(tmp_path / "p.jsonl", [chat("Q9?", "A")])
    work, _ = stage(tmp_path, model, {"pool": "p.jsonl", "target": "t.jsonl", "holdout": "h.jsonl"})
    assert [(row["split"], row["reason"]) for row in work.rows("quarantine")] == [("target", "leak")]
    assert sorted(questions(work, "target") + questions(work, "validation")) == ["Q2?", "Q3?"]


def test_no_two_splits_share_a_task(tmp_path: Path, model: Path) -> None:
    rng = random.Random(0)
    rows = [chat(f"Question {i}?", f"answer {i}", task=f"task{rng.randrange(12)}") for i in range(120)]
    jsonl(tmp_path / "t.jsonl", rows[:60])
    jsonl(tmp_path / "p.jsonl", [*rows[60:], chat("No task", "x"), chat("New task", "x", task="fresh")])
    work, summary = stage(tmp_path, model, {"pool": "p.jsonl", "target": "t.jsonl"}, task_field="task")
    tasks = {
        split: {json.loads(row["extra"])["task"] for row in work.rows(split)}
        for split in ("pool", "target", "validation", "holdout")
    }
    assert all(tasks.values())
    for one in tasks:
        for other in tasks:
            assert one == other or not tasks[one] & tasks[other]
    count = Counter(row["reason"] for row in work.rows("quarantine"))
    assert count["no_task"] == 1
    assert count["leak"] + len(tasks["pool"]) <= 62
    assert summary.facts["rows read"] == 122


def test_the_cut_depends_on_the_seed_and_not_on_the_order_of_rows(tmp_path: Path, model: Path) -> None:
    rows = [chat(f"Question {i}?", f"answer {i}") for i in range(50)]
    jsonl(tmp_path / "p.jsonl", [chat("Pool?", "p")])
    jsonl(tmp_path / "t.jsonl", rows)
    jsonl(tmp_path / "t2" / "t.jsonl", rows[::-1])
    given = stage(tmp_path, model, {"pool": "p.jsonl", "target": "t.jsonl"})[0]
    turned = stage(tmp_path, model, {"pool": "p.jsonl", "target": "t2/t.jsonl"})[0]
    other = stage(tmp_path, model, {"pool": "p.jsonl", "target": "t.jsonl"}, seed=1)[0]
    sizes = {split: len(given.rows(split)) for split in ("target", "validation", "holdout")}
    assert sizes == {"target": 20, "validation": 10, "holdout": 20}
    for split in sizes:
        assert questions(given, split) == questions(turned, split)
    assert questions(given, "holdout") != questions(other, "holdout")


def test_rows_of_one_question_stay_together_even_where_duplicates_are_kept(tmp_path: Path, model: Path) -> None:
    rows = [chat(f"Question {i % 8}?", f"answer {i % 16}") for i in range(64)]
    jsonl(tmp_path / "t.jsonl", rows)
    jsonl(tmp_path / "p.jsonl", [chat("Pool?", "p")] * 3)
    work, _ = stage(tmp_path, model, {"pool": "p.jsonl", "target": "t.jsonl"}, dedupe="none")
    asked = [set(questions(work, split)) for split in ("target", "validation", "holdout")]
    assert sum(map(len, asked)) == 8
    assert sum(len(work.rows(split)) for split in ("target", "validation", "holdout")) == 64
    assert len(work.rows("pool")) == 3


def test_too_small_an_empty_or_a_fully_leaked_split_is_an_error_that_says_so(tmp_path: Path, model: Path) -> None:
    jsonl(tmp_path / "p.jsonl", [chat("Pool?", "p")])
    jsonl(tmp_path / "two.jsonl", [chat("A?", "a"), chat("B?", "b")])
    jsonl(tmp_path / "three.jsonl", [chat("A?", "a"), chat("B?", "b"), chat("C?", "c")])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="it holds 2"):
        stage(tmp_path, model, {"pool": "p.jsonl", "target": "two.jsonl"})
    with pytest.raises(InputError, match="no usable row: 0 of 0 in target"):
        stage(tmp_path, model, {"pool": "p.jsonl", "target": "empty.jsonl"})
    with pytest.raises(InputError, match=r"no usable row: 0 of 3 in pool.*leak"):
        stage(tmp_path, model, {"pool": "three.jsonl", "target": "three.jsonl"})
    with pytest.raises(ConfigError, match=r"0\.5"):
        stage(
            tmp_path,
            model,
            {"pool": "p.jsonl", "target": "three.jsonl", "validation_fraction": 0.5, "holdout_fraction": 0.5},
        )
    work, _ = stage(tmp_path, model, {"pool": "p.jsonl", "target": "three.jsonl"})
    assert [len(work.rows(split)) for split in ("pool", "target", "validation", "holdout")] == [1, 1, 1, 1]


def test_a_cut_gives_every_split_a_unit_and_about_its_share() -> None:
    units = {f"{i}".encode(): 1 + i % 5 for i in range(400)}
    placed = cut(units, {"holdout": 0.4, "validation": 0.2}, 7, "tasks")
    rows = Counter[str]()
    for unit, split in placed.items():
        rows[split] += units[unit]
    total = sum(units.values())
    assert abs(rows["holdout"] / total - 0.4) < 0.01
    assert abs(rows["validation"] / total - 0.2) < 0.01
    three = cut({b"a": 1000, b"b": 1, b"c": 1}, {"holdout": 0.4, "validation": 0.2}, 0, "tasks")
    assert sorted(three.values()) == ["holdout", "target", "validation"]


def test_the_first_of_equal_rows_is_kept_and_named(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [chat("Q?", "A", id="one"), chat("Q? ", "A", id="two")])
    jsonl(tmp_path / "b.jsonl", [chat("Q?", "A"), chat("Tell", LONG, id="l"), chat("Tell", f"{LONG} more", id="m")])
    work = pool(tmp_path, "a.jsonl", "b.jsonl")
    refused = work.rows("quarantine")
    assert [row["reason"] for row in refused] == ["duplicate", "duplicate", "near_duplicate"]
    assert "duplicate_of one (line 1 of a.jsonl)" in refused[0]["detail"]
    assert "duplicate_of l (line 2 of b.jsonl)" in refused[2]["detail"]
    assert len(pool(tmp_path, "a.jsonl", "b.jsonl", dedupe="exact").rows("pool")) == 3
    assert len(pool(tmp_path, "a.jsonl", "b.jsonl", dedupe="none").rows("pool")) == 5
    assert answers(work) == ["A", LONG]


def test_repeated_ids_are_told_and_rows_kept(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [chat("Q1?", "A", id="x"), chat("Q2?", "A", id="x")])
    work = pool(tmp_path, "a.jsonl")
    assert len(work.rows("pool")) == 2
    assert any("ids repeat: 1" in notice for notice in work.notices)
