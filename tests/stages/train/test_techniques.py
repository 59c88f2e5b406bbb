"""Every technique through the stage: killed inside a segment and resumed, and a second segment from its checkpoint."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from data_contracts.config import GovernConfig, TrainConfig
from data_contracts.errors import ConfigError
from stages.model.checkpoint import load_merged
from stages.train import loop
from stages.train.stage import STAGE, TrainSlice
from tests.local_work import work_for
from tests.stages.train.small import House

TECHNIQUES = [
    {"method": "badam", "block_steps": 3},
    {"method": "mezo"},
    {"method": "lozo", "interval": 2, "momentum": 0.5},
    {"method": "qlora", "r": 2},
    {"method": "hybrid", "block_steps": 3, "long_tokens": 14},
]
if find_spec("bitsandbytes") is None:
    TECHNIQUES = [item for item in TECHNIQUES if item["method"] != "qlora"]


def config(**train):
    values = {"learning_rate": 5e-3, "warmup_steps": 0, "evaluations": 2, "snapshot_steps": 2, "epochs": 1.0}
    return TrainSlice(seed=3, train=TrainConfig(**(values | train)), govern=GovernConfig())


def run(folder, house, **more):
    work = work_for(STAGE, folder, seed=3)
    summary = STAGE.run(config(), house.inputs(**more), work)
    return summary, work, {name: work.artifact(name).ref.digest for name in sorted(work.opened)}


class Killed(Exception):
    pass


@pytest.mark.parametrize("settings", TECHNIQUES, ids=lambda item: item["method"])
def test_a_killed_segment_resumes_to_the_same_bytes_and_the_next_one_goes_on(tmp_path, monkeypatch, settings):
    house = House(tmp_path / "house", rows=20, plan={"technique": settings})
    summary, work, expected = run(tmp_path / "whole", house)
    assert summary.facts["steps"] == 5
    assert summary.facts["steps_not_applied"] == 0
    real, made = loop._Segment._step, []

    def dying(self):
        made.append(1)
        if len(made) == 4:
            raise Killed
        real(self)

    monkeypatch.setattr(loop._Segment, "_step", dying)
    with pytest.raises(Killed):
        run(tmp_path / "killed", house)
    monkeypatch.undo()
    assert run(tmp_path / "killed", house)[2] == expected

    checkpoint = work.artifact("checkpoint")
    trainer = json.loads((checkpoint.folder / "trainer.json").read_text())
    assert trainer["optimizer"]["windows"] == trainer["step"]
    again, second, _ = run(tmp_path / "second", house, checkpoint=checkpoint)
    assert again.facts["loss_before"] == summary.facts["loss_after"]
    on = json.loads((second.artifact("checkpoint").folder / "trainer.json").read_text())
    assert on["optimizer"]["windows"] == trainer["step"] + on["step"] - 5
    assert on["optimizer"].get("seed") == trainer["optimizer"].get("seed")
    for artifact in (checkpoint, second.artifact("checkpoint")):
        model = load_merged(artifact.folder, house.pin)
        assert all(value.isfinite().all() for value in model.state_dict().values())
        assert type(model).__name__ == "LlamaForCausalLM"
        assert not any("codes" in name for name, _ in model.named_buffers())


@pytest.mark.parametrize("method", ["badam", "mezo", "hybrid"])
def test_influence_in_training_is_refused_where_what_trains_changes(tmp_path, method):
    house = House(tmp_path / "house", plan={"technique": {"method": method}})
    work = work_for(STAGE, tmp_path / "work", seed=3)
    with pytest.raises(ConfigError, match=method):
        STAGE.run(config(influence="segment"), house.inputs(), work)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is absent: pip install .[quantised]")
def test_a_run_turns_from_qlora_to_full_training_of_what_was_held(tmp_path):
    _, work, _ = run(tmp_path / "first", House(tmp_path / "house", rows=8, plan={"technique": TECHNIQUES[3]}))
    checkpoint = work.artifact("checkpoint")
    turned = House(tmp_path / "turned", rows=8, plan={"technique": {"method": "full"}})
    second = work_for(STAGE, tmp_path / "second", seed=3)
    STAGE.run(config(learning_rate=1e-12), turned.inputs(checkpoint=checkpoint), second)
    held = load_merged(checkpoint.folder, turned.pin).state_dict()
    found = load_merged(second.artifact("checkpoint").folder, turned.pin).state_dict()
    base = load_merged(None, turned.pin).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert all((found[key] - held[key]).abs().max() < 1e-6 for key in held)
    assert (base[name] - held[name]).abs().max() > 1e-3
