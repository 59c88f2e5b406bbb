"""T01 and T02: a pad token that is the end token, and fewer rows than a batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data_contracts.config import GovernConfig, ModelConfig, TrainConfig
from data_contracts.errors import ConfigError
from data_contracts.records import ModelPin
from stages.model.batch import Row, collate
from stages.model.load import load_model, load_tokenizer, pin_model
from stages.model.loss import document_losses
from stages.model.tokenise import Renderer
from stages.stage import Inputs
from stages.train.stage import STAGE, TrainSlice
from tests.local_work import LocalWork, work_for
from tests.stages.train.small import GIVES, plan_of, selection_columns

pytestmark = pytest.mark.shared


def rows_of(pin: ModelPin, path: Path) -> list[Row]:
    """Return the chats of a JSON Lines file as rows, by the model's own tokenizer and template."""
    renderer = Renderer(load_tokenizer(pin))
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        ids, mask, _ = renderer.render(record["messages"])
        rows.append(Row(record["id"], np.array(ids), np.array(mask)))
    return rows


def with_own_pad(folder: Path, target: Path) -> ModelPin:
    """Copy a model and give it a pad token of its own."""
    shutil.copytree(folder, target)
    for name in ("tokenizer_config.json", "config.json"):
        values = json.loads((target / name).read_text())
        values |= {"pad_token": "<bos>"} if name == "tokenizer_config.json" else {"pad_token_id": 256}
        (target / name).write_text(json.dumps(values))
    return pin_model(ModelConfig(path=target.name), target.parent)


def test_T01_a_pad_token_that_is_the_end_token_hides_no_real_end(shared, tmp_path):
    case = shared / "cases/files/T01-pad-is-eos"
    pin = pin_model(ModelConfig(path="model"), case)
    tokenizer = load_tokenizer(pin)
    assert tokenizer.pad_token == tokenizer.eos_token
    rows = rows_of(pin, case / "pool.jsonl")
    batch = collate(rows)
    assert tokenizer.decode(rows[0].input_ids) == "U:a?\nA:ok<eos>"
    assert len(rows[0].input_ids) == 10
    labels = torch.where(batch.answer_BT, batch.input_ids_BT, -100).tolist()
    assert labels[0][:7] == [-100] * 7
    assert labels[0][7:10] == [111, 107, 257]
    for index, row in enumerate(rows):
        length = len(row.input_ids)
        assert batch.attention_BT[index].tolist() == [place < length for place in range(batch.shape[1])]
        assert labels[index][length:] == [-100] * (batch.shape[1] - length)
        assert labels[index].count(257) == 1
        assert labels[index][length - 1] == 257
    own = with_own_pad(case / "model", tmp_path / "model")
    others = rows_of(own, case / "pool.jsonl")
    again = collate(others)
    assert load_tokenizer(own).pad_token != load_tokenizer(own).eos_token
    assert torch.equal(again.input_ids_BT, batch.input_ids_BT)
    assert torch.equal(again.answer_BT, batch.answer_BT)
    together = document_losses(load_model(pin), batch)[0]
    alone = torch.cat([document_losses(load_model(own), collate([row]))[0] for row in others])
    torch.testing.assert_close(together, alone)


def train_t02(shared: Path, tmp_path: Path, *, drop_last: bool):
    """Train on the case's three rows as its settings say and return (pin, summary, work)."""
    case = shared / "cases/files/T02-fewer-rows-than-a-batch"
    settings = json.loads((case / "train.json").read_text())
    pin = pin_model(ModelConfig(path="model"), case)
    rows = rows_of(pin, case / "selected.jsonl")
    tokens = {
        "example_id": [row.example_id for row in rows],
        "source": ["selected"] * len(rows),
        "input_ids": [row.input_ids.tolist() for row in rows],
        "answer_mask": [row.answer_mask.tolist() for row in rows],
        "n_tokens": [len(row.input_ids) for row in rows],
        "n_answer_tokens": [int(row.answer_mask.sum()) for row in rows],
        "truncated": [False] * len(rows),
    }
    given = LocalWork(tmp_path / "given", GIVES)
    given.record("base", pin)
    batch, accumulation = settings["per_device_batch_size"], settings["gradient_accumulation_steps"]
    given.record("plan", plan_of(micro_batch=batch, accumulation=accumulation))
    given.table("tokens", tokens)
    given.table("validation_tokens", tokens)
    given.table("selection", selection_columns(tokens["example_id"]))
    names = ("base", "plan", "tokens", "validation_tokens", "selection")
    work = work_for(STAGE, tmp_path / "work", seed=settings["seed"])
    train = TrainConfig(
        learning_rate=settings["learning_rate"], epochs=settings["epochs"], drop_last=drop_last, warmup_steps=0
    )
    config = TrainSlice(seed=settings["seed"], train=train, govern=GovernConfig())
    summary = STAGE.run(config, Inputs({name: (given.artifact(name),) for name in names}), work)
    return pin, summary, work


def test_T02_fewer_rows_than_a_batch_make_one_smaller_step(shared, tmp_path):
    pin, summary, work = train_t02(shared, tmp_path, drop_last=False)
    assert (summary.facts["steps"], summary.facts["rows"]) == (1, 3)
    losses = work.rows("example_losses")
    assert sorted(row["example_id"] for row in losses) == ["w1", "w2", "w3"]
    curve = work.rows("curve")
    assert len(curve) == 1
    assert curve[0]["train_loss"] == pytest.approx(
        sum(row["loss_sum"] for row in losses) / sum(row["answer_tokens"] for row in losses), rel=1e-6
    )
    assert curve[0]["train_loss"] > 0
    base, trained = load_model(pin).state_dict(), load_file(work.artifact("checkpoint").folder / "model.safetensors")
    assert any(not torch.equal(value, base[name]) for name, value in trained.items())


def test_T02_with_the_last_batch_dropped_it_stops_before_loading_weights(shared, tmp_path):
    message = r"0 steps: 3 rows < 4 x 8 = 32 per step with drop_last"
    with pytest.raises(ConfigError, match=message) as caught:
        train_t02(shared, tmp_path, drop_last=True)
    assert "turn `train.drop_last` off" in caught.value.remedy
    assert not (tmp_path / "work/outputs").exists()
