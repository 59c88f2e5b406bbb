"""Influence on real weights and real text: a LoRA checkpoint, and the plan's bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from data_contracts.config import ModelConfig, ScoreConfig
from data_contracts.records import ModelPin, Plan
from stages.model.batch import Row
from stages.model.checkpoint import load_checkpoint, save_checkpoint
from stages.model.load import load_model, load_tokenizer, pin_model
from stages.score.stage import STAGE, ScoreSlice
from stages.stage import Artifact
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.gradients.test_inner_product import explicit_gradient
from tests.stages.score.setting import ADAM, record_of, tokens_of

pytestmark = pytest.mark.shared


def questions(shared: Path, pin: ModelPin, count: int, start: int = 0) -> list[Row]:
    tokenizer = load_tokenizer(pin)
    lines = (shared / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for index in range(start, start + count):
        item = json.loads(lines[index])
        prompt = tokenizer(item["question"])["input_ids"][:60]
        answer = tokenizer(item["answer"], add_special_tokens=False)["input_ids"][:40]
        rows.append(Row(f"{index:04d}", np.array(prompt + answer), np.arange(len(prompt + answer)) >= len(prompt)))
    return rows


@pytest.fixture
def setting(shared: Path, tmp_path: Path) -> tuple[ModelPin, dict[str, Artifact], list[Row], list[Row]]:
    pin = pin_model(ModelConfig(path="stories260k"), shared / "data")
    torch.manual_seed(0)
    model = get_peft_model(load_model(pin), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))
    moments = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.1  # as after some training: B is no longer zero
            moments[name] = (torch.zeros_like(parameter), torch.rand_like(parameter) * 1e-4 + 1e-8)
    work = LocalWork(tmp_path / "checkpoint", {"c": "checkpoint"})
    save_checkpoint(
        work.path("c"), model, pin, moments, {"technique": {"method": "lora"}, "step": 6, **ADAM, "updates": 6}
    )
    pool, target = questions(shared, pin, 12), questions(shared, pin, 4, start=50)
    inputs = {
        "base": record_of(tmp_path / "base", "base", pin),
        "checkpoint": work.artifact("c"),
        "pool_tokens": tokens_of(tmp_path / "pool", pool),
        "target_tokens": tokens_of(tmp_path / "target", target),
    }
    return pin, inputs, pool, target


def scores_of(folder: Path, inputs: dict[str, Artifact], **config: Any) -> np.ndarray:
    work = work_for(STAGE, folder)
    STAGE.run(ScoreSlice(seed=0, score=ScoreConfig(**config)), inputs_of(**inputs), work)
    return np.array([row["score"] for row in work.rows("scores")])


def test_influence_of_a_lora_checkpoint_equals_the_explicit_product(setting: Any, tmp_path: Path) -> None:
    pin, inputs, pool, target = setting
    found = {
        per: scores_of(tmp_path / per, inputs, scorer={"method": "influence", "per": per}) for per in ("visit", "token")
    }
    trained = load_checkpoint(inputs["checkpoint"].folder, pin, dtype=torch.float64)
    goal = [explicit_gradient(trained.model, row) for row in target]
    expected = []
    counts = []
    for row in pool:
        gradient, _, tokens = explicit_gradient(trained.model, row)
        total = 0.0
        counts.append(tokens)
        for name, value in gradient.items():
            mean = sum(other[name] / count for other, _, count in goal) / len(goal)
            root = torch.sqrt(trained.moments[name][1].double() / (1 - ADAM["beta2"] ** 6)) + ADAM["epsilon"]
            total += float((value * mean / root).sum())
        expected.append(total)
    assert set(gradient) == set(trained.moments)
    summed, mean_token = np.array(expected), np.array(expected) / np.array(counts)
    np.testing.assert_allclose(found["visit"], summed, atol=1e-4 * np.abs(summed).max())
    np.testing.assert_allclose(found["token"], mean_token, atol=1e-4 * np.abs(mean_token).max())


def test_forward_only_influence_of_a_lora_checkpoint_ranks_as_the_direct_one(setting: Any, tmp_path: Path) -> None:
    _, inputs, _, _ = setting
    direct = scores_of(tmp_path / "direct", inputs, scorer={"method": "influence"})
    forward = scores_of(tmp_path / "forward", inputs, scorer={"method": "influence_forward", "calibration_rows": 2})
    np.testing.assert_allclose(forward, direct, atol=0.01 * np.abs(direct).max())


def bfloat16_plan() -> Plan:
    return Plan(
        technique={"method": "lora"},
        precision="bfloat16",
        micro_batch=1,
        accumulation=1,
        packed=False,
        row_tokens=100,
        trainable=1,
        peak_bytes=1,
        phases={},
        flops_per_token=1,
        flops_per_token_forward=1,
        pass_flops=1,
        why="a test",
    )


def test_bfloat16_where_the_plan_asks_for_it_keeps_the_ranking(setting: Any, tmp_path: Path) -> None:
    _, inputs, _, _ = setting
    exact = scores_of(tmp_path / "float32", inputs, scorer={"method": "influence"})
    rough = scores_of(
        tmp_path / "bfloat16",
        {**inputs, "plan": record_of(tmp_path / "plan", "plan", bfloat16_plan())},
        scorer={"method": "influence"},
    )
    assert not np.array_equal(exact, rough)
    assert np.corrcoef(exact, rough)[0, 1] > 0.995
