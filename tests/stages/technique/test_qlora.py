"""QLoRA: what the quantised base computes, against bitsandbytes' own dequantised weights; merging, checkpoints, bytes."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from data_contracts.config import TrainConfig
from stages.model.batch import collate
from stages.model.checkpoint import load_checkpoint, load_merged, save_checkpoint
from stages.model.load import empty_model, load_model
from stages.model.loss import document_losses
from stages.model.nf4 import Nf4Linear
from stages.technique.step import trainable
from tests.stages.technique.setting import pinned, rows, technique, windows

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is absent: pip install .[quantised]")
SETTINGS = {"method": "qlora", "r": 4, "alpha": 8}


@pytest.fixture(scope="module")
def pin(tmp_path_factory):
    return pinned(tmp_path_factory.mktemp("models") / "wide", 2, hidden=32)


def dense(pin, **settings):
    """Return LoRA on a base whose weights bitsandbytes has quantised and dequantised."""
    base = load_model(pin)
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, state = bitsandbytes.functional.quantize_4bit(
                module.weight.data, quant_type="nf4", compress_statistics=settings.get("double_quant", True)
            )
            module.weight.data = bitsandbytes.functional.dequantize_4bit(codes, state)
    torch.manual_seed(1)
    return technique("lora", r=4, alpha=8).wrap(base)


def held(pin, **settings):
    torch.manual_seed(1)
    return technique(**SETTINGS, **settings).wrap(load_model(pin))


def gradient(model):
    loss_D, _ = document_losses(model, collate(rows(4)))
    loss_D.sum().backward()
    return loss_D.detach(), {name: item.grad.clone() for name, item in trainable(model).items()}


def stir(model, seed=2):
    torch.manual_seed(seed)
    for item in trainable(model).values():
        item.data = torch.randn_like(item) * 0.2


@pytest.mark.parametrize("double", [True, False])
def test_losses_and_gradients_are_those_of_the_dequantised_base_also_after_an_evaluation(pin, double):
    """bitsandbytes' own layer repacks its weights in an evaluation on some CPUs and passes no gradient on afterwards."""
    ours, theirs = held(pin, double_quant=double), dense(pin, double_quant=double)
    assert set(trainable(ours)) == set(trainable(theirs))
    stir(ours)
    stir(theirs)
    for model in (ours, theirs):
        model.eval()
        with torch.no_grad():
            document_losses(model, collate(rows(2)))
        model.train()
    (loss, found), (expected_loss, expected) = gradient(ours), gradient(theirs)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        assert value.abs().max() > 0


def test_merging_gives_a_plain_model_that_computes_what_was_trained(pin, tmp_path):
    method, model = technique(**SETTINGS), held(pin)
    stir(model)
    model.eval()
    ids = collate(rows(3)).input_ids_BT
    trainer = {"technique": SETTINGS, "step": 1, "tokens": 0, "learning_rate": 1e-2, "updates": 0}
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        save_checkpoint(tmp_path / "c", model, pin, {}, trainer)
        again = load_checkpoint(tmp_path / "c", pin).model
        assert sum(isinstance(module, Nf4Linear) for module in again.modules()) == 14
        assert torch.equal(again(input_ids=ids).logits, expected)
        merged = method.merge(model)
        for plain in (merged, load_merged(tmp_path / "c", pin)):
            assert not any(isinstance(module, Nf4Linear) or "lora" in name for name, module in plain.named_modules())
            torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
            assert plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
        merged.save_pretrained(tmp_path / "merged")
        other = technique("lora", r=4, alpha=8).wrap(load_model(pin))
        stir(other)
        unquantised = technique("lora").merge(other)(input_ids=ids).logits
    assert (unquantised - expected).abs().max() > 20 * (merged(input_ids=ids).logits - expected).abs().max()


def test_a_base_takes_the_bits_that_it_says_and_a_plan_sees_the_same_shapes(pin):
    method = technique(**SETTINGS)
    real, planned = method.wrap(load_model(pin)), method.wrap(empty_model(pin))
    for one, other in zip(real.modules(), planned.modules(), strict=True):
        if isinstance(one, Nf4Linear):
            shapes = [{n: (b.shape, b.dtype) for n, b in layer.named_buffers()} for layer in (one, other)]
            assert shapes[0] == shapes[1]
            numbers = one.in_features * one.out_features
            blocks = math.ceil(numbers / 64)
            beside = 4 * (256 + 1)  # the scales' code and mean
            # 4.127 bits a weight where blocks are many
            expected = numbers / 2 + blocks + 4 * math.ceil(blocks / 256) + beside
            assert sum(item.nbytes for item in one.buffers()) == expected


def test_three_steps_learn_and_adapters_alone_move(pin):
    method = technique(**SETTINGS)
    model = method.wrap(load_model(pin)).train()
    before = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    optimizer = method.optimizer(model, TrainConfig(), 1e-2, 0)
    found = windows(1)[0]
    losses = [optimizer.step(found, 1e-2, clip=1.0).loss for _ in range(6)]
    assert losses[-1] < losses[0] - 0.01
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(value, before[name]) != (("lora_" in name) and value.requires_grad)


def test_dora_is_refused():
    with pytest.raises(ValidationError):
        type(technique("qlora"))(use_dora=True)
