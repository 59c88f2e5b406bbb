"""Adapters trained beside a model that stays, added up exactly, saved and found again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_contracts.config import TrainConfig
from stages.model.batch import collate
from stages.model.loss import document_losses
from stages.technique.methods.lora import Lora
from stages.technique.probe import Adapter, interpolated, train_adapter
from tests.stages.train.small import llama, token_columns

LORA = Lora(r=2, alpha=8)


def batches(seed: int, count: int):
    from stages.model.batch import Row

    columns = token_columns(4 * count, seed)
    rows = [
        Row(name, np.array(ids), np.array(mask))
        for name, ids, mask in zip(columns["example_id"], columns["input_ids"], columns["answer_mask"], strict=True)
    ]
    return [[collate(rows[4 * at : 4 * at + 2]), collate(rows[4 * at + 2 : 4 * at + 4])] for at in range(count)]


def trained(model, seed=1, start=5):
    return train_adapter(
        model, batches(seed, 3), lora=LORA, train=TrainConfig(), learning_rate=1e-2, seed=start
    )  # fmt: skip


def losses(model):
    model.eval()
    with torch.no_grad():
        return document_losses(model, batches(9, 1)[0][0])[0]


def test_training_an_adapter_leaves_the_model_as_it_was_and_repeats_itself():
    model = llama(seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, again = trained(model), trained(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert set(before) == set(model.state_dict())
    assert all(torch.equal(first.up[name], again.up[name]) for name in first.up)
    assert any(first.up[name].abs().max() > 0 for name in first.up)
    assert len(first.down) == 2 * 7  # every linear layer of two blocks, the head apart


def test_an_interpolated_model_is_the_one_with_the_weighted_sum_of_updates_and_is_restored():
    model = llama(seed=0)
    adapters = [trained(model, seed=1), trained(model, seed=2)]
    before, plain = {name: value.clone() for name, value in model.state_dict().items()}, losses(model)
    by_hand = llama(seed=0)
    for name in adapters[0].down:
        layer = by_hand.get_submodule(name)
        update = sum(
            share * (adapter.up[name].double() @ adapter.down[name].double())
            for share, adapter in zip((0.3, 0.7), adapters, strict=True)
        )
        layer.weight.data = (layer.weight.data.double() + update).float()
    with interpolated(model, adapters, [0.3, 0.7]):
        inside = losses(model)
    assert inside == pytest.approx(losses(by_hand), rel=1e-5)
    assert (inside - plain).abs().max() > 1e-4
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_one_adapter_whole_is_what_training_it_gave():
    model = llama(seed=0)
    again = llama(seed=0)
    torch.manual_seed(5)
    wrapped = LORA.wrap(again)
    from stages.technique.step import optimizer_for, optimizer_step

    wrapped.train()
    optimizer = optimizer_for(wrapped, TrainConfig(), 1e-2)
    for window in batches(1, 3):
        optimizer_step(wrapped, optimizer, window, clip=1.0)
    with interpolated(model, [trained(model)], [1.0]):
        assert losses(model) == pytest.approx(losses(wrapped), rel=1e-4)


def test_an_adapter_is_saved_and_found_again_in_a_model_that_stores_weights_transposed(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=8, n_layer=1, n_head=2, use_cache=False))
    adapter = train_adapter(
        model, batches(1, 2), lora=Lora(r=2, alpha=8), train=TrainConfig(), learning_rate=1e-2, seed=0
    )
    adapter.save(tmp_path / "a.safetensors")
    found = Adapter.load(tmp_path / "a.safetensors", model)
    assert found.transposed == adapter.transposed
    assert len(found.transposed) == 4
    for name in adapter.down:
        assert torch.equal(found.update(name), adapter.update(name))
        assert found.update(name).shape == model.get_submodule(name).weight.shape
