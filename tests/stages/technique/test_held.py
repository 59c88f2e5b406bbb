"""QA-LoRA, PEQA and DQT: against dense models in float64, merging to the same outputs in n bits, what moves, what is
held."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from stages.model.batch import collate
from stages.model.bits import packed_bytes, unpack_bits
from stages.model.checkpoint import load_checkpoint, save_checkpoint
from stages.model.grouped import GroupedLinear
from stages.model.load import load_model
from stages.model.loss import document_losses
from stages.model.packed import release_packed
from stages.technique.grid import GridLinear, GridStep
from stages.technique.held import GroupAdapter, TrainedScales
from stages.technique.optimizer import named_moments
from stages.technique.step import trainable
from tests.stages.technique.setting import TRAIN, llama, pinned, rows, technique, windows

SETTINGS = {
    "qa_lora": {"r": 3, "alpha": 6, "group_size": 8},
    "peqa": {"bits": 3, "group_size": 8},
    "dqt": {"bits": 4, "group_size": 8},
}


def begun(name, **more):
    method = technique(name, **(SETTINGS[name] | more))
    torch.manual_seed(1)
    model = method.wrap(llama(2)).train()
    return method.optimizer(model, TRAIN, 1e-2, 5)


def layers(model, kind):
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def stirred(shape, seed=2, inputs=20, bits=4):
    torch.manual_seed(seed)
    held = GroupAdapter(nn.Linear(inputs, 12), bits, shape, rank=3, scaling=0.7, dropout=0.0)
    held.up.data = torch.randn_like(held.up) * 0.3
    return held


@pytest.mark.parametrize("group", [4, 8])
def test_an_adapter_of_groups_is_a_dense_one_and_merging_it_changes_no_output_and_no_number(group):
    """Rounding the new zero points to whole ones, as packed formats do, would change what was trained."""
    held = stirred(group)
    x = torch.randn(5, 20)
    expand = torch.arange(20) // group
    dense = held.weight_as(torch.float64) + 0.7 * (held.up.double() @ held.down.double())[:, expand]
    expected = x.double() @ dense.T + held.bias.double()
    torch.testing.assert_close(held(x).double(), expected, rtol=1e-5, atol=1e-5)
    merged = held.folded()
    assert torch.equal(merged.codes, held.codes)
    assert torch.equal(merged.scales, held.scales)
    assert merged.codes.nbytes == packed_bytes(12 * held.groups * group, 4)
    torch.testing.assert_close(merged(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.weight_as(torch.float64), dense, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(held.plain()(x).double(), expected, rtol=1e-5, atol=1e-5)
    rounded = copy.deepcopy(merged)
    rounded.zeros = rounded.zeros.round()
    assert (rounded(x).double() - expected).abs().max() > 1e-2


def test_a_trained_qa_lora_merges_to_a_plain_model_that_computes_what_was_trained(tmp_path):
    method = technique("qa_lora", **SETTINGS["qa_lora"])
    pin = pinned(tmp_path / "m", 2)
    torch.manual_seed(1)
    model = method.wrap(load_model(pin)).train()
    optimizer = method.optimizer(model, TRAIN, 1e-2, 5)
    assert sum(item.numel() for item in trainable(model).values()) == method.trainable_count(load_model(pin))
    before = {name: layer.codes.clone() for name, layer in layers(model, GroupedLinear).items()}
    losses = [optimizer.step(windows(1)[0], 3e-2, clip=1.0).loss for _ in range(5)]
    assert losses[-1] < losses[0] - 0.01
    assert all(torch.equal(layer.codes, before[name]) for name, layer in layers(model, GroupedLinear).items())
    ids = collate(rows(3)).input_ids_BT
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        torch.testing.assert_close(method.merge(model)(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert not layers(model, GroupedLinear)


@pytest.mark.parametrize("bias", [True, False])
def test_the_scales_gradient_is_that_of_a_dense_weight_in_float64(bias):
    torch.manual_seed(0)
    held = TrainedScales(nn.Linear(20, 12, bias=bias).requires_grad_(False), 3, 8)
    x = torch.randn(2, 3, 20, requires_grad=True)
    out = held(x).square().sum()
    found = torch.autograd.grad(out, [x, held.scales])
    numbers = unpack_bits(held.codes, 3, 12 * 24).view(12, 3, 8).double() - held.zeros.double()[..., None]
    scales, y = held.scales.detach().double().requires_grad_(), x.detach().double().requires_grad_()
    weight = (scales[..., None] * numbers).flatten(1)[:, :20]
    dense = functional.linear(y, weight, None if held.bias is None else held.bias.double()).square().sum()
    for one, other in zip(found, torch.autograd.grad(dense, [y, scales]), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_peqa_moves_scales_alone_and_its_moments_are_as_few():
    optimizer = begun("peqa")
    model = optimizer.model
    count = technique("peqa", **SETTINGS["peqa"]).trainable_count(llama(2))
    assert sum(item.numel() for item in trainable(model).values()) == count
    before = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    losses = [optimizer.step(windows(1)[0], 3e-2, clip=1.0).loss for _ in range(5)]
    assert losses[-1] < losses[0] - 0.01
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(value, before[name]) != name.endswith(".scales")
    assert sum(value.numel() for name, value in optimizer.held().items() if "exp_avg" in name) == 2 * count


def test_dqt_has_the_loss_and_the_gradients_of_the_weights_that_it_holds():
    model = begun("dqt").model
    dense = copy.deepcopy(model)
    release_packed(dense)
    dense.requires_grad_(True)
    batch, found = collate(rows(4)), []
    for each in (model, dense):
        loss_D, _ = document_losses(each, batch)
        loss_D.sum().backward()
        found.append((loss_D.detach(), {name: item.grad for name, item in each.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert set(found[0][1]) == set(found[1][1])
    for name, value in found[1][1].items():
        torch.testing.assert_close(found[0][1][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_weights_of_dqt_are_really_n_bits_before_and_after_steps(bits):
    optimizer = begun("dqt", bits=bits)
    for _ in range(2):
        for layer in layers(optimizer.model, GridLinear).values():
            tensors = [*layer.parameters(), *layer.buffers()]
            size = sum(item.untyped_storage().nbytes() for item in tensors)
            groups = -(-layer.in_features // 8)
            assert size == layer.out_features * groups * (bits + 4) + 4  # eight numbers a group, one scale; one number
        optimizer.step(windows(1)[0], 1e-2, clip=1.0)
    assert technique("dqt").trainable_count(llama(2)) == sum(item.numel() for item in optimizer.model.parameters())


def test_a_dqt_step_is_adamw_in_the_mean_however_small_beside_the_numbers_distance():
    """Of torch's AdamW on the dense weight, over the draws of many windows; rounding to the nearest would not move."""
    torch.manual_seed(0)
    layer, gradient = GridLinear(nn.Linear(16, 24, bias=False), 4, 8), torch.randn(24, 16)
    settings = {"lr": 1e-4, "weight_decay": 0.1}
    start, codes, scales = layer.whole(), layer.codes.clone(), layer.scales.clone()
    dense = nn.Parameter(start.clone())
    dense.grad = gradient.clone()
    torch.optim.AdamW([dense], **settings).step()
    expected, distance = (dense.detach() - start).double(), scales.double().repeat_interleave(8, dim=1)
    assert (expected.abs() < 0.01 * distance).all()
    grid = GridStep(torch.optim.AdamW([layer.weight], **settings), {layer.weight: ("w", layer)}, seed=0)
    total, count = torch.zeros(24, 16, dtype=torch.float64), 2000
    for grid.window in range(count):
        layer.codes.copy_(codes)
        layer.scales.copy_(scales)
        grid.adamw.state.clear()
        layer.weight.grad = gradient.clone()
        grid.step()
        total += layer.weight_as(torch.float64) - start
    assert layer.weight.untyped_storage().nbytes() == 4
    along = (total / count * expected.sign()).sum()
    spread = (expected.abs() * distance / count).sum().sqrt()  # of coins that are right in a share of the draws
    assert expected.abs().sum() > 20 * spread
    assert abs(along - expected.abs().sum()) < 5 * spread


def test_updates_inside_the_backward_pass_round_to_the_same_numbers():
    found = []
    for inside in (False, True):
        optimizer = begun("dqt")
        for seed in range(3):
            optimizer.step([collate(rows(4, seed))], 1e-2, clip=0.5, in_backward=inside)
        found.append({name: value.clone() for name, value in optimizer.weights().items()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_checkpoint_is_a_plain_model_and_the_next_segment_has_the_same_numbers(name, tmp_path):
    pin, method = pinned(tmp_path / "m", 2), technique(name, **SETTINGS[name])
    torch.manual_seed(1)
    model = method.wrap(load_model(pin)).train()
    optimizer = method.optimizer(model, TRAIN, 1e-2, 5)
    for window in windows(2):
        optimizer.step(window, 1e-2, clip=1.0)
    save_checkpoint(tmp_path / "c", model, pin, {}, {"technique": SETTINGS[name]}, optimizer.tensors())
    loaded = load_checkpoint(tmp_path / "c", pin)
    ids = collate(rows(3)).input_ids_BT
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.model(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )
    again = method.optimizer(method.wrap(loaded.model).train(), TRAIN, 1e-2, 99)
    again.restore(optimizer.plain(), loaded.state | named_moments(loaded.moments))
    for each in (optimizer, again):
        each.step(windows(3)[2], 1e-2, clip=1.0)
    for key, value in optimizer.tensors().items():
        assert torch.equal(value, again.tensors()[key]), key
