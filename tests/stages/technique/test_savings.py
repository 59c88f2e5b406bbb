"""What saves memory in a step leaves what is learnt as it is; 8-bit moments within a stated gap."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from data_contracts.config import TrainConfig
from data_contracts.errors import ConfigError, ModelError
from stages.model.batch import collate
from stages.model.loss import document_losses
from stages.model.packing import collate_packed, pack
from stages.technique import states, states_4bit
from stages.technique.frozen import halve_frozen
from stages.technique.methods.lora import Lora
from stages.technique.offload import LEAST_BYTES, Offloading
from stages.technique.recompute import blocks_of, recompute
from stages.technique.states import AdamW8bit
from stages.technique.step import (
    held_states,
    load_moments,
    load_states,
    moments_of,
    optimizer_for,
    optimizer_step,
    trainable,
)
from tests.stages.technique.test_step import rows_of
from tests.stages.train.small import llama

needs_8bit = pytest.mark.skipif(not states.has_8bit(), reason="bitsandbytes is not installed")
FORMS = ["float32", pytest.param("8bit", marks=needs_8bit), "4bit", "mini"]


def trained(model, *, steps=4, optimizer_states="float32", cut=5, rate=1e-2, **settings):
    """Train on the same windows of ten rows; return (document losses by step, weights, optimizer)."""
    model = copy.deepcopy(model).train()
    recompute(model, settings.pop("recomputed", ()))
    optimizer = optimizer_for(model, TrainConfig(weight_decay=0.1), rate, optimizer_states)
    torch.manual_seed(7)
    rows, losses = rows_of(10), []
    for _ in range(steps):
        window = [collate(rows[start : start + cut]) for start in range(0, 10, cut)]
        losses.append(optimizer_step(model, optimizer, window, clip=0.5, **settings).document_loss_D)
    return torch.stack(losses), trainable(model), optimizer


def same(one, other):
    return torch.equal(one[0], other[0]) and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def test_the_head_in_chunks_gives_every_document_its_loss_and_the_same_trajectory():
    plain, chunked = (trained(llama(), loss_chunks=chunks) for chunks in (1, 7))
    torch.testing.assert_close(chunked[0], plain[0], rtol=1e-5, atol=1e-5)
    for name, value in plain[1].items():
        torch.testing.assert_close(chunked[1][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)])
def test_recomputed_blocks_change_no_bit_dropout_included(places):
    model = Lora(r=4, dropout=0.2).wrap(llama())
    assert len(blocks_of(model)) == 2
    assert same(trained(model, recomputed=places), trained(model))


def test_a_block_that_the_model_does_not_have_is_refused():
    with pytest.raises(ModelError, match="block 2"):
        recompute(llama(), (0, 2))


@pytest.mark.parametrize("technique", ["full", "lora"])
@pytest.mark.parametrize("optimizer_states", FORMS)
def test_updates_inside_the_backward_pass_change_no_bit_clipping_and_dropout_included(technique, optimizer_states):
    model = llama(tied=technique == "full") if technique == "full" else Lora(r=4, dropout=0.2).wrap(llama())
    settings = {"cut": 10, "optimizer_states": optimizer_states, "recomputed": (0,)}
    plain, inside = trained(model, **settings), trained(model, in_backward=True, **settings)
    assert same(plain, inside)
    before, after = (moments_of(run[2], model) for run in (plain, inside))
    assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name], strict=True))


def test_updates_inside_the_backward_pass_hold_one_gradient_at_a_time():
    model, held = llama(), []
    for item in model.parameters():
        item.register_post_accumulate_grad_hook(lambda _: held.append(sum(p.grad is not None for p in watched)))
    watched = list(model.parameters())
    optimizer = optimizer_for(model, TrainConfig(), 1e-2)
    optimizer_step(model, optimizer, [collate(rows_of(4))], clip=1.0, in_backward=True)
    assert max(held) == 1
    with pytest.raises(ConfigError, match="2 micro-batches"):
        optimizer_step(model, optimizer, [collate(rows_of(2))] * 2, clip=1.0, in_backward=True)


def test_a_broken_loss_is_not_applied_inside_the_backward_pass_either():
    model = llama()
    before = copy.deepcopy(model.state_dict())
    model.model.norm.register_forward_hook(lambda module, args, out: out * torch.inf)
    optimizer = optimizer_for(model, TrainConfig(), 1e-2)
    result = optimizer_step(model, optimizer, [collate(rows_of(4))], clip=1.0, in_backward=True)
    assert not result.applied
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


def wide(**more):
    """A Llama whose matrices are large enough for 8 bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True, use_cache=False, **more)
    )


@pytest.fixture(scope="module")
def exact():
    return trained(wide(), steps=20, rate=2e-3)


@pytest.mark.parametrize(
    ("form", "size", "gap"),
    [
        pytest.param("8bit", 2 * 64 * 128 + 2 * 4 * 32, 0.02, marks=needs_8bit),
        ("4bit", 64 * 128 + 2 * 4 * 64, 0.15),
        ("mini", 4 * 64 * 128 + 4 * 128, 0.15),
    ],
)
def test_other_forms_of_moments_keep_the_loss_within_a_gap_and_take_the_bytes_they_say(exact, form, size, gap):
    small = trained(wide(), steps=20, optimizer_states=form, rate=2e-3)
    first, last, found = exact[0][0].sum(), exact[0][-1].sum(), small[0][-1].sum()
    assert last < 0.8 * first
    assert abs(found - last) < gap * last
    assert not torch.equal(found, last)
    held = [sum(value.nbytes for value in run[2].state[run[1]["model.layers.0.mlp.up_proj.weight"]].values()
                if torch.is_tensor(value)) for run in (exact, small)]  # fmt: skip
    assert held == [8 * 64 * 128 + 4, size]


@pytest.mark.parametrize("shape", [(96, 64), (70, 100), (30, 20)])
def test_a_step_in_4_bits_is_adamw_whose_moments_are_rounded_to_the_nearest_code_after_it(monkeypatch, shape):
    """In numpy, each number against all 16 codes; numbers of no whole blocks, or fewer than 4,096, stay float32."""
    monkeypatch.setattr(states_4bit, "PIECE", 1024)
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape))
    optimizer = states_4bit.AdamW4bit([weight], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    codes = [np.sort([s * v for v in (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875) for s in (1, -1)]
                     + [0.0, 1.0]), np.arange(1, 17) / 16]  # fmt: skip
    quantised = shape == (96, 64)
    expected, moments = weight.detach().double().numpy().ravel(), [np.zeros(weight.numel()) for _ in range(2)]
    for step in range(1, 5):
        weight.grad = torch.randn(shape)
        gradient = weight.grad.double().numpy().ravel()
        optimizer.step()
        first = 0.9 * moments[0] + 0.1 * gradient
        second = 0.99 * moments[1] + 0.01 * gradient**2
        root = np.sqrt(second / (1 - 0.99**step)) + 1e-8
        expected = expected * (1 - 1e-3) - 1e-2 * first / (1 - 0.9**step) / root
        moments = [first, second]
        if quantised:
            for place, (value, code) in enumerate(zip((first, second), codes, strict=True)):
                blocks = value.reshape(-1, 128)
                scale = np.abs(blocks).max(1, keepdims=True)
                nearest = np.abs((blocks / scale)[..., None] - code).argmin(-1)
                moments[place] = (code[nearest] * scale).ravel()
    np.testing.assert_allclose(weight.detach().double().numpy().ravel(), expected, rtol=1e-4, atol=1e-5)
    found = optimizer.decode(weight, optimizer.state[weight])
    for one, other in zip(found, moments, strict=True):
        np.testing.assert_allclose(one.double().numpy().ravel(), other, rtol=1e-4, atol=1e-6)


def test_adam_mini_has_one_second_moment_a_head_an_output_or_a_token_as_a_loop_over_them_has():
    model = wide(num_key_value_heads=1)
    optimizer = optimizer_for(model, TrainConfig(weight_decay=0.1), 1e-2, "mini")
    named = dict(model.named_parameters())
    before = {name: item.detach().double() for name, item in named.items()}
    draw = torch.Generator().manual_seed(0)
    gradients = [{name: torch.randn(item.shape, generator=draw) for name, item in named.items()} for _ in range(3)]
    for each in gradients:
        for name, item in named.items():
            item.grad = each[name].clone()
        optimizer.step()
    heads = {"q_proj": 2, "k_proj": 1}
    for name, item in named.items():
        matrix, expected = item.ndim == 2, before[name]
        count = heads.get(name.split(".")[-2], item.shape[0])
        blocks = range(count) if matrix else range(1)
        for block in blocks:
            rows = (
                slice(block * item.shape[0] // count, (block + 1) * item.shape[0] // count) if matrix else slice(None)
            )
            part, first, second = expected[rows], 0.0, 0.0
            for step, each in enumerate(gradients, start=1):
                gradient = each[name][rows].double()
                first = 0.9 * first + 0.1 * gradient
                second = 0.999 * second + 0.001 * (gradient.square().mean() if matrix else gradient.square())
                root = (second / (1 - 0.999**step)).sqrt() + 1e-8
                part = part * (1 - (1e-3 if matrix else 0)) - 1e-2 * (first / (1 - 0.9**step)) / root
            torch.testing.assert_close(item[rows].double(), part, rtol=1e-4, atol=1e-5)
        numbers = optimizer.state[item]["exp_avg_sq"].numel()
        assert numbers == (count if matrix else item.numel()), name


@needs_8bit
@pytest.mark.parametrize("piece", [2**22, 1024])
def test_a_step_in_8_bits_is_bitsandbytes_own(monkeypatch, piece):
    import bitsandbytes

    monkeypatch.setattr(states, "PIECE", piece)
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(70, 100)), torch.nn.Parameter(torch.randn(50, 60))]
    theirs = [torch.nn.Parameter(item.detach().clone()) for item in ours]
    settings = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    one, other = AdamW8bit(ours, **settings), bitsandbytes.optim.AdamW8bit(theirs, **settings)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        one.step()
        other.step()
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-6)  # 3,000 numbers: float32 moments
    assert torch.equal(one.state[ours[0]]["exp_avg"], other.state[theirs[0]]["state1"])


@pytest.mark.parametrize(("form", "off"), [pytest.param("8bit", 0.02, marks=needs_8bit), ("4bit", 0.12), ("mini", 1.0)])
def test_moments_given_to_another_form_come_back_within_a_step_of_its_code(form, off):
    model = wide()
    _, weights, optimizer = trained(model, steps=6)
    exact = {name: tuple(optimizer.state[p][k] for k in ("exp_avg", "exp_avg_sq")) for name, p in weights.items()}
    other = optimizer_for(model, TrainConfig(), 1e-2, form)
    load_moments(other, model, exact, 6)
    for name, pair in moments_of(other, model).items():
        for found, expected in zip(pair, exact[name], strict=True):
            scale = expected.abs().max()
            assert (found - expected).abs().max() <= off * scale, name
            torch.testing.assert_close(found.mean(), expected.mean(), rtol=0.1, atol=off * scale.item() / 4)


@pytest.mark.parametrize("optimizer_states", FORMS)
def test_states_survive_a_snapshot_to_the_bit(optimizer_states):
    model = wide()
    optimizer = optimizer_for(model, TrainConfig(), 1e-2, optimizer_states)
    window = [collate(rows_of(4))]
    for _ in range(3):
        optimizer_step(model, optimizer, window, clip=1.0)
    held = {name: value.clone() for name, value in held_states(optimizer, model).items()}
    second = copy.deepcopy(model)
    other = optimizer_for(second, TrainConfig(), 1e-2, optimizer_states)
    load_states(other, second, held)
    for one, states_of in ((model, optimizer), (second, other)):
        optimizer_step(one, states_of, window, clip=1.0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), second.parameters(), strict=True))


def test_frozen_weights_in_bfloat16_give_the_losses_and_weights_that_autocast_gives():
    halved = [Lora(r=4, dropout=0.2).wrap(wide()) for _ in range(2)]
    halve_frozen(halved[1], "bfloat16")
    linear = halved[1].base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    assert linear.dtype == torch.bfloat16
    assert halved[1].get_input_embeddings().weight.dtype == torch.float32
    for item in trainable(halved[1]).values():
        assert item.dtype == torch.float32
    with torch.no_grad():
        for (_, one), (_, other) in zip(*(trainable(model).items() for model in halved), strict=True):
            other.copy_(one)
    assert same(*(trained(model, precision="bfloat16") for model in halved))
    exact = Lora(r=4).wrap(wide())
    halve_frozen(exact, "float32")
    assert {item.dtype for item in exact.parameters()} == {torch.float32}


@pytest.mark.parametrize("settings", [{"host": "cpu"}, {"optimizer_states": "host"}, {"host": "cpu", "recomputed": (0,)},
                                      {"host": "cpu", "optimizer_states": "host", "in_backward": True, "cut": 10}])  # fmt: skip
def test_what_waits_on_another_device_changes_no_bit(settings):
    plain = {key: value for key, value in settings.items() if key in ("in_backward", "cut", "recomputed")}
    assert same(trained(llama(), **plain)[:2], trained(llama(), **settings)[:2])


def test_every_activation_worth_a_copy_waits_and_every_weight_stays():
    model, kept, sent = llama().train(), [], []
    weights = {item.untyped_storage()._cdata for item in model.parameters()}

    class Noting(Offloading):
        def _pack(self, tensor):
            found = super()._pack(tensor)
            (kept if found is tensor else sent).append(tensor)
            return found

    with Noting(model, "cpu"):
        document_losses(model, collate(rows_of(10)))[0].sum().backward()
    assert sent
    assert not any(item.untyped_storage()._cdata in weights for item in sent)
    assert all(item.nbytes < LEAST_BYTES or item.untyped_storage()._cdata in weights for item in kept)


def test_moments_that_wait_survive_a_snapshot_to_the_bit():
    model = copy.deepcopy(llama())
    optimizer = optimizer_for(model, TrainConfig(), 1e-2, "host")
    window = [collate(rows_of(4))]
    optimizer_step(model, optimizer, window, clip=1.0)
    held = {name: value.clone() for name, value in held_states(optimizer, model).items()}
    again = copy.deepcopy(model)
    other = optimizer_for(again, TrainConfig(), 1e-2, "host")
    load_states(other, again, held)
    for one, inner in ((model, optimizer), (again, other)):
        optimizer_step(one, inner, window, clip=1.0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_packed_rows_keep_the_trajectory():
    """To 1e-5 of the loss: the documents of a row are summed in another order."""
    losses = {}
    for packed in (False, True):
        model, found, kept = llama().train(), rows_of(10), []
        optimizer = optimizer_for(model, TrainConfig(weight_decay=0.1), 1e-2)
        groups = [[found[place] for place in group] for group in pack(found, 40)]
        window = [collate_packed(groups) if packed else collate(found)]
        for _ in range(4):
            kept.append(optimizer_step(model, optimizer, window, clip=0.5).loss)
        losses[packed] = kept
    assert len(groups) < len(found)
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert losses[False][3] < losses[False][0]
