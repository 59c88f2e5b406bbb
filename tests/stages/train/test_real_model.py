"""A real pretrained model on real worked answers: the warm-up and a segment lower its validation loss."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from data_contracts.config import GovernConfig, ModelConfig, TrainConfig
from stages.model.load import load_tokenizer, pin_model
from stages.model.tokenise import Renderer
from stages.stage import Inputs
from stages.train.begin import STAGE as BEGIN
from stages.train.begin import BeginSlice
from stages.train.stage import STAGE, TrainSlice
from tests.local_work import LocalWork, work_for
from tests.stages.train.small import GIVES, plan_of, selection_columns

pytestmark = pytest.mark.shared
LONGEST = 300


def token_rows(renderer: Renderer, path: Path, start: int, count: int) -> dict[str, list]:
    columns: dict[str, list] = {name: [] for name in ("example_id", "input_ids", "answer_mask")}
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for number, line in enumerate(islice(stream, start, start + count)):
            record = json.loads(line)
            chat = [{"role": "user", "content": record["question"]}, {"role": "assistant", "content": record["answer"]}]
            ids, mask, _ = renderer.render(chat)
            if len(ids) <= LONGEST:
                columns["example_id"].append(f"{start + number:032x}")
                columns["input_ids"].append(ids)
                columns["answer_mask"].append(mask)
    count = len(columns["example_id"])
    return columns | {
        "source": ["gsm8k"] * count,
        "n_tokens": [len(ids) for ids in columns["input_ids"]],
        "n_answer_tokens": [sum(mask) for mask in columns["answer_mask"]],
        "truncated": [False] * count,
    }


@pytest.mark.slow
def test_the_warm_up_and_a_segment_lower_a_real_models_loss_beyond_its_interval(shared, tmp_path):
    from transformers import AutoModelForCausalLM

    data = shared / "data/gsm8k/train.jsonl.gz"
    pin = pin_model(ModelConfig(path="stories260k"), shared / "data")
    renderer = Renderer(load_tokenizer(pin))
    given = LocalWork(tmp_path / "given", GIVES)
    validation = token_rows(renderer, data, 0, 60)
    given.record("base", pin)
    given.record("plan", plan_of(micro_batch=4, accumulation=2, row_tokens=LONGEST))
    pool = token_rows(renderer, data, 100, 160)
    given.table("tokens", pool)
    given.table("validation_tokens", validation)
    given.table("selection", selection_columns(pool["example_id"]))
    item = {name: given.artifact(name) for name in GIVES if name not in ("decision", "target_tokens")}
    begin = work_for(BEGIN, tmp_path / "begin", seed=1)
    settings = TrainConfig(learning_rate=2e-3, warmup_steps=2, evaluations=2)
    first = BEGIN.run(
        BeginSlice.model_validate({"seed": 1, "begin": {"fraction": 0.2}, "train": settings.model_dump()}),
        Inputs(
            {
                "base": (item["base"],),
                "plan": (item["plan"],),
                "pool_tokens": (item["tokens"],),
                "validation_tokens": (item["validation_tokens"],),
            }
        ),
        begin,
    )
    model = AutoModelForCausalLM.from_pretrained(shared / "data/stories260k", dtype=torch.float32).eval()
    total = tokens = 0.0
    for ids, mask in zip(validation["input_ids"], validation["answer_mask"], strict=True):
        labels = torch.where(torch.tensor(mask), torch.tensor(ids), -100)[None]
        count = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(input_ids=torch.tensor(ids)[None], labels=labels).loss) * count
        tokens += count
    assert first.facts["loss_before"] == pytest.approx(total / tokens, rel=1e-5)
    work = work_for(STAGE, tmp_path / "work", seed=1)
    config = TrainSlice(seed=1, train=settings, govern=GovernConfig(policy={"method": "patience"}))
    second = STAGE.run(
        config, Inputs({**{k: (v,) for k, v in item.items()}, "checkpoint": (begin.artifact("checkpoint"),)}), work
    )
    assert second.facts["loss_before"] == first.facts["loss_after"]
    (_, before, low, _), _ = first.tables[0].rows
    _, (_, after, _, high) = second.tables[0].rows
    assert after < before
    assert high < low  # the 95 % intervals do not meet
    noise = [row["gradient_noise"] for row in work.rows("curve") if row["gradient_noise"] is not None]
    assert noise
    assert all(value > 0 for value in noise)
