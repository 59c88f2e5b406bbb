"""The planning cases: a misspelt layer name, and a token id past the embedding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_contracts.config import ModelConfig
from data_contracts.errors import MethodError, ModelError
from data_contracts.records import ModelPin
from stages.model.load import load_tokenizer, pin_model
from stages.stage import Artifact
from tests.conftest import ROOT
from tests.local_work import LocalWork
from tests.stages.plan import conftest
from tests.stages.plan.conftest import random_rows, token_columns

pytestmark = pytest.mark.shared
given, planned = conftest.given, conftest.planned
Given, Planned = Callable[..., dict[str, Artifact]], Callable[..., tuple[Any, LocalWork, Any]]
LINEAR = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"


def case(shared: Path, name: str) -> Path:
    return next((shared / "cases/files").glob(f"{name}-*"))


def technique(folder: Path, file: str) -> dict[str, Any]:
    asked = json.loads((folder / file).read_text())["lora"]
    return {"plan": {"techniques": [{"method": "lora", **asked}]}}


def test_P01_a_misspelt_lora_target_stops_before_any_weight_is_loaded(
    shared: Path,
    given: Given,
    planned: Planned,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = case(shared, "P01")
    pin = pin_model(ModelConfig(path="model"), folder)
    assert pin.parameters == 2744
    inputs = given(pin, pool=token_columns(random_rows(20, 30)))

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("stages.model.load.load_folder", loaded)
    with pytest.raises(MethodError) as caught:
        planned(technique(folder, "lora.json"), inputs)
    text = str(caught.value)
    assert "'v_porj' matches no module" in text
    assert "'v_proj'" in caught.value.remedy
    assert LINEAR in caught.value.remedy
    plan, _, summary = planned(technique(folder, "fixed.json"), inputs)
    assert plan.trainable == 64
    assert summary.facts["trainable_parameters"] == 64
    assert summary.facts["base_parameters"] == 2744


def tables(folder: Path, pin: ModelPin, file: str, place: Path) -> tuple[dict[str, list[Any]], Artifact]:
    """Tokenise a case's pool as chats; return its tokens and its examples."""
    tokenizer = load_tokenizer(pin)
    rows, examples = [], []
    for number, line in enumerate((folder / file).read_text().splitlines()):
        item = json.loads(line)
        ids = tokenizer.apply_chat_template(item["messages"], tokenize=True, return_dict=False)
        rows.append((list(ids), [False, *[True] * (len(ids) - 1)]))
        examples.append(
            {"example_id": f"{number:032x}", "source": "pool", "file": file, "row": number + 1, "text": "",
             "messages": json.dumps(item["messages"]), "tools": "", "extra": json.dumps({"id": item["id"]})}
        )  # fmt: skip
    work = LocalWork(place, {"pool": "examples"})
    work.table("pool", {name: [item[name] for item in examples] for name in examples[0]})
    return token_columns(rows), work.artifact("pool")


def test_P02_a_token_id_past_the_embedding_is_named_with_its_row_and_remedy(
    shared: Path,
    tmp_path: Path,
    given: Given,
    planned: Planned,
) -> None:
    folder = case(shared, "P02")
    pin = pin_model(ModelConfig(path="model"), folder)
    columns, pool = tables(folder, pin, "pool.jsonl", tmp_path / "examples")
    inputs = given(pin, pool=columns)
    with pytest.raises(ModelError) as caught:
        planned({}, {**inputs, "pool": pool})
    text = str(caught.value)
    assert "token '<|tool|>' has id 260 but the embedding has 260 rows (0..259)" in text
    assert "the first: v2 (pool.jsonl, record 2)" in text
    assert "resize the embedding" in caught.value.remedy
    assert "drop the token" in caught.value.remedy
    with pytest.raises(ModelError, match=f"the first: {1:032x}"):
        planned({}, inputs)


def test_P02_a_token_that_no_row_uses_is_a_warning(
    shared: Path,
    tmp_path: Path,
    given: Given,
    planned: Planned,
) -> None:
    folder = case(shared, "P02")
    pin = pin_model(ModelConfig(path="model"), folder)
    columns, _ = tables(folder, pin, "pool_ok.jsonl", tmp_path / "examples")
    _, work, summary = planned({}, given(pin, pool=columns))
    assert any("'<|tool|>' has id 260" in notice and "no row uses it" in notice for notice in work.notices)
    assert summary.facts["embedding_weights"] == 260 * 8


def test_P02_a_resized_embedding_is_counted(
    shared: Path,
    tmp_path: Path,
    given: Given,
    planned: Planned,
) -> None:
    folder = case(shared, "P02")
    pin = pin_model(ModelConfig(path="model"), folder, resize=True)
    columns, _ = tables(folder, pin, "pool.jsonl", tmp_path / "examples")
    plan, work, summary = planned({}, given(pin, pool=columns))
    assert summary.facts["embedding_weights"] == 261 * 8
    assert plan.trainable == summary.facts["base_parameters"] == 2744 + 8
    assert not any("embedding" in notice for notice in work.notices)


def test_P02_the_command_stops_where_ingest_refused_a_row_for_such_a_token(shared: Path, tmp_path: Path) -> None:
    folder = case(shared, "P02")

    def planning(pool: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "flows.command.app",
            "plan",
            "--model",
            folder / "model",
            "--pool",
            folder / pool,
        ]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )

    stopped = planning("pool.jsonl")
    said = " ".join((stopped.stdout + stopped.stderr).split())
    assert stopped.returncode == 2
    assert "token '<|tool|>' has id 260 but the embedding has 260 rows (0..259)" in said
    assert "(id 'v2')" in said
    assert "resize the embedding" in said
    assert planning("pool_ok.jsonl").returncode == 0
