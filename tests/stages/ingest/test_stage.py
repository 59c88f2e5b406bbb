"""The stage whole: on real data, through the runner, the same bytes every time, and light to import."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from data_contracts.config import DataConfig, IngestConfig, ModelConfig
from data_contracts.records import ModelPin
from data_contracts.tables import SPLITS
from stages.ingest.stage import STAGE, IngestSlice
from tests.conftest import ROOT
from tests.stages.ingest.files import answers, chat, jsonl, pool, reasons, stage


def test_importing_the_stage_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, stages.ingest.stage; print([m for m in ('torch', 'transformers', 'datasets', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.shared
def test_equal_inputs_give_equal_digests_wherever_they_lie(shared: Path, tmp_path: Path) -> None:
    model = shared / "data" / "stories260k"
    rows = [chat(f"Question {i}?", f"answer {i}", note=i) for i in range(40)]
    digests = []
    for place in ("here", "there/deep"):
        jsonl(tmp_path / place / "t.jsonl", rows[:20])
        jsonl(tmp_path / place / "p.jsonl", rows[20:])
        work, _ = stage(tmp_path, model, {"pool": f"{place}/p.jsonl", "target": f"{place}/t.jsonl"})
        digests.append(
            [work.artifact(name).ref.digest for name in STAGE.gives if name not in ("base", *STAGE.optional)]
        )
    assert digests[0] == digests[1]


@pytest.mark.shared
def test_what_enters_the_identity_is_content_and_names_but_no_path(shared: Path, tmp_path: Path) -> None:
    def external(root: Path, file: str = "p.jsonl", **settings: object) -> dict:
        config = IngestSlice(
            seed=0,
            model=ModelConfig(path=str(shared / "data" / "stories260k")),
            data=DataConfig(pool=(file,), target=("t.jsonl",)),
            ingest=IngestConfig.model_validate(settings),
        )
        return STAGE.external(config, root)

    for place in ("a", "b"):
        jsonl(tmp_path / place / "p.jsonl", [chat("Q?", "A")])
        jsonl(tmp_path / place / "t.jsonl", [chat("R?", "A")])
    shutil.copy(tmp_path / "a" / "p.jsonl", tmp_path / "a" / "other.jsonl")
    given = external(tmp_path / "a")
    assert given == external(tmp_path / "b")
    assert given != external(tmp_path / "a", "other.jsonl")  # its stem becomes the rows' source
    assert given != external(tmp_path / "a", supervise="last")
    assert str(tmp_path) not in json.dumps(given)
    assert "retention" not in given["data"]  # a run without one is what it was before there was such a split
    jsonl(tmp_path / "b" / "t.jsonl", [chat("R?", "B")])
    assert given != external(tmp_path / "b")


@pytest.mark.shared
def test_maths_questions_become_four_splits_and_tokens(shared: Path, tmp_path: Path) -> None:
    data = shared / "data"
    lines = gzip.decompress((data / "gsm8k" / "train.jsonl.gz").read_bytes()).splitlines()[:600]
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(lines))
    files = {"pool": "train.jsonl", "target": str(data / "gsm8k" / "test.jsonl")}
    work, summary = stage(tmp_path, data / "stories260k", files, longest_tokens=512)
    assert summary.facts["rows read"] == 600 + 1319
    assert [row["reason"] for row in work.rows("quarantine")] == []
    assert [len(work.rows(split)) for split in SPLITS] == [600, 527, 264, 528]
    for split in SPLITS:
        examples, tokens = work.rows(split), work.rows(f"{split}_tokens")
        assert [row["example_id"] for row in examples] == [row["example_id"] for row in tokens]
        assert max(row["n_tokens"] for row in tokens) <= 512
    pin = ModelPin.model_validate_json((work.home / "outputs" / "base" / "record.json").read_bytes())
    assert pin.vocabulary == 512
    first = json.loads(lines[0])
    found = next(row for row in work.rows("pool") if row["row"] == 1)
    assert json.loads(found["messages"])[0] == {"role": "user", "content": first["question"]}
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data / "stories260k")
    row = next(row for row in work.rows("pool_tokens") if row["example_id"] == found["example_id"])
    learnt = [token for token, bit in zip(row["input_ids"], row["answer_mask"], strict=True) if bit]
    assert tokenizer.decode(learnt).strip() == first["answer"] + "</s>"


@pytest.mark.shared
@pytest.mark.slow
def test_instructions_keep_all_but_true_copies(shared: Path, tmp_path: Path) -> None:
    """Rows of a task share one long instruction; of 14,500 only those whose input and answer are alike go."""
    work = pool(tmp_path, str(shared / "data" / "super_ni"), source_field="category", task_field="task")
    count = Counter(reason for _, reason in reasons(work))
    assert set(count) <= {"near_duplicate", "duplicate"}
    assert count["near_duplicate"] < 60
    kept = work.rows("pool")
    assert len(kept) + sum(count.values()) == 14500
    assert len({row["source"] for row in kept}) == 25


@pytest.mark.shared
def test_web_text_is_supervised_whole(shared: Path, tmp_path: Path) -> None:
    data = shared / "data"
    given = [json.loads(line) for line in (data / "c4_demo" / "c4_demo.jsonl").read_text().split("\n") if line]
    work = pool(tmp_path, str(data / "c4_demo"), model=data / "stories260k")
    assert len(work.rows("pool")) + len(work.rows("quarantine")) == len(given) == 300
    texts = {row["text"] for row in given}
    assert set(answers(work)) <= texts
    assert all(row["n_answer_tokens"] == row["n_tokens"] - 1 for row in work.rows("pool_tokens"))
