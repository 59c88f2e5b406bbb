"""Techniques: what trains, how many numbers that is, and that merging keeps what was learnt."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from data_contracts.config import TrainConfig
from data_contracts.errors import MethodError
from data_contracts.method import find, names, resolve
from stages.model.batch import collate
from stages.model.checkpoint import load_checkpoint, load_merged, save_checkpoint
from stages.technique.base import Technique
from stages.technique.step import moments_of, optimizer_for, optimizer_step, trainable
from tests.stages.technique.test_step import rows_of
from tests.stages.train.small import llama, write_model


def test_both_techniques_are_found_by_name():
    assert {"full", "lora"} <= set(names(Technique))
    assert find(Technique, "lora").learning_rate > find(Technique, "full").learning_rate


def test_full_trains_every_number_and_counts_a_tied_embedding_once():
    technique, model = resolve(Technique, {"method": "full"}, "plan"), llama(tied=True)
    wrapped = technique.wrap(model)
    assert technique.trainable_count(model) == sum(item.numel() for item in trainable(wrapped).values())
    assert technique.trainable_count(llama(tied=False)) == technique.trainable_count(model) + 64 * 16


@pytest.mark.parametrize("settings", [{}, {"r": 3}, {"use_dora": True}, {"target_modules": ["q_proj", "down_proj"]}])
def test_lora_trains_its_adapters_alone_and_counts_them_before_they_exist(settings):
    technique = resolve(Technique, {"method": "lora", **settings}, "plan")
    with torch.device("meta"):
        expected = technique.trainable_count(llama())
    model = technique.wrap(llama())
    assert sum(item.numel() for item in trainable(model).values()) == expected
    assert all("lora_" in name for name in trainable(model))
    if not settings:
        assert all("lm_head" not in name and "embed" not in name for name in trainable(model))
        adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in trainable(model)}
        assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("tied", [True, False])
def test_lora_trains_the_embedding_where_asked_for_and_goes_on_with_it_from_a_checkpoint(tmp_path, tied):
    pin = write_model(tmp_path / "model", tied=tied)
    technique = resolve(Technique, {"method": "lora", "r": 3, "embeddings": True}, "plan")
    model = technique.wrap(load_merged(None, pin))
    assert sum(item.numel() for item in trainable(model).values()) == technique.trainable_count(load_merged(None, pin))
    optimizer = optimizer_for(model, TrainConfig(), 1e-2)
    optimizer_step(model.train(), optimizer, [collate(rows_of(4))], clip=1.0)
    trainer = {"technique": {}, "step": 1, "tokens": 0, "learning_rate": 1e-2, "updates": 1}
    save_checkpoint(tmp_path / "checkpoint", model, pin, moments_of(optimizer, model), trainer)
    again = load_checkpoint(tmp_path / "checkpoint", pin)
    assert set(trainable(again.model)) == set(trainable(model)) == set(again.moments)
    assert all(torch.equal(trainable(again.model)[name], item) for name, item in trainable(model).items())
    frozen = load_checkpoint(tmp_path / "checkpoint", pin, trainable=False)
    assert not trainable(frozen.model)
    from peft import PeftModel  # the library alone makes the same model of the files

    theirs = PeftModel.from_pretrained(load_merged(None, pin), str(tmp_path / "checkpoint"))
    batch = collate(rows_of(4))
    logits = [one.eval()(input_ids=batch.input_ids_BT).logits for one in (model, theirs, frozen.model)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_lora_starts_from_the_base_exactly():
    base, batch = llama(), collate(rows_of(3))
    expected = base(input_ids=batch.input_ids_BT).logits
    model = resolve(Technique, {"method": "lora"}, "plan").wrap(llama())
    assert torch.equal(model(input_ids=batch.input_ids_BT).logits, expected)


def test_a_misspelt_target_is_refused_with_the_nearest_name():
    technique = resolve(Technique, {"method": "lora", "target_modules": ["q_porj"]}, "plan")
    with pytest.raises(MethodError, match="did you mean 'q_proj'"):
        technique.wrap(llama())
    with pytest.raises(MethodError, match="q_porj"):
        technique.trainable_count(llama())


def test_a_tied_head_is_no_target_and_an_untied_one_is():
    technique = resolve(Technique, {"method": "lora", "target_modules": ["lm_head"]}, "plan")
    with pytest.raises(MethodError, match="shares its weight"):
        technique.wrap(llama(tied=True))
    assert len(trainable(technique.wrap(llama(tied=False)))) == 2


@pytest.mark.parametrize("values", [{"r": 0}, {"alpha": 0}, {"dropout": 1.0}, {"rank": 4}])
def test_a_value_out_of_range_or_unknown_is_refused(values):
    with pytest.raises(ValidationError):
        find(Technique, "lora")(**values)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lora", "r": 4},
        {"method": "lora", "use_dora": True},
        {"method": "lora", "r": 4, "embeddings": True},
        {"method": "full"},
    ],
)
def test_a_merged_model_survives_a_reload_with_its_ties(tmp_path, tied, settings):
    pin = write_model(tmp_path / "model", tied=tied)
    technique = resolve(Technique, settings, "plan")
    model, batch = technique.wrap(load_merged(None, pin)), collate(rows_of(4))
    optimizer = optimizer_for(model, TrainConfig(), 1e-2)
    model.train()
    for _ in range(3):
        optimizer_step(model, optimizer, [batch], clip=1.0)
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=batch.input_ids_BT).logits
        start = load_merged(None, pin)(input_ids=batch.input_ids_BT).logits
    trainer = {"technique": settings, "step": 3, "tokens": 0, "learning_rate": 1e-2, "updates": 3}
    save_checkpoint(tmp_path / "checkpoint", model, pin, moments_of(optimizer, model), trainer)
    with torch.no_grad():
        merged = technique.merge(model)
        torch.testing.assert_close(merged(input_ids=batch.input_ids_BT).logits, expected, rtol=1e-4, atol=1e-5)
        merged.save_pretrained(tmp_path / "merged")
        again = type(merged).from_pretrained(tmp_path / "merged")
        loaded = load_merged(tmp_path / "checkpoint", pin)
    for other in (again, loaded):
        shared = other.get_output_embeddings().weight is other.get_input_embeddings().weight
        assert shared is tied
        torch.testing.assert_close(other(input_ids=batch.input_ids_BT).logits, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, start, atol=1e-2)
