"""The hybrid: both of its parts by hand, its limits, what rows read by forward passes alone keep."""

from __future__ import annotations

import copy

import pytest
import torch

from data_contracts.config import TrainConfig
from stages.model.batch import collate
from stages.model.load import load_model
from stages.model.packed import PackedLinear, release_packed
from stages.plan.estimate import Estimator
from stages.plan.trace import Shape
from stages.technique.step import trainable
from stages.technique.zeroth import drawn
from tests.stages.technique.setting import llama, pinned, rows, technique, windows
from tests.stages.technique.test_step import by_hand

FREE = {"clip": 1e9}
OUTSIDE = {"model.embed_tokens.weight", "model.norm.weight"}


def begun(layers=3, **settings):
    method = technique("hybrid", **settings)
    model = method.wrap(llama(layers)).train()
    return method.optimizer(model, TrainConfig(), 1e-2, 5)


def released(model):
    """Return a plain copy of what `model` holds, the same parameters trained."""
    plain, names = copy.deepcopy(model), set(trainable(model))
    release_packed(plain)
    for name, item in plain.named_parameters():
        item.requires_grad_(name in names)
    return plain


def parts(optimizer, window, rate):
    """Take a step whose AdamW moves nothing; return the result, the gradients that AdamW saw, and how weights moved."""
    before, found = {name: item.detach().clone() for name, item in optimizer.model.named_parameters()}, {}

    def step():
        found.update({name: item.grad.clone() for name, item in trainable(optimizer.model).items()})

    optimizer.adamw.step = step
    result = optimizer.step(window, rate, **FREE)
    return result, found, {name: item.detach() - before[name] for name, item in optimizer.model.named_parameters()}


def slope_by_hand(model, found, seed, window, epsilon):
    """Return the central difference of the mean loss along z of what lies outside the layers, and z."""
    named = dict(model.named_parameters())
    along = {name: drawn(named[name].shape, named[name], seed, window, name) for name in OUTSIDE}
    losses = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        for name, value in along.items():
            moved.get_parameter(name).data.add_(value, alpha=sign * epsilon)
        losses.append(by_hand(moved, found)[0])
    return (losses[0] - losses[1]) / (2 * epsilon), along


@pytest.mark.parametrize("long_tokens", [None, 14])
def test_it_moves_by_the_gradient_of_short_rows_and_along_the_slope_of_the_others(long_tokens):
    optimizer = begun(share=0.3, epsilon=3e-3, long_tokens=long_tokens, order="ascending")
    found = rows(8)
    near, far = ([row for row in found if (len(row.input_ids) > 14) is long] for long in (False, True))
    assert len(near) > 2
    assert len(far) > 2
    model = released(optimizer.model)
    _, first = by_hand(model, near if long_tokens else found)
    slope, along = slope_by_hand(model, far if long_tokens else found, 5, 0, 3e-3)
    window = [collate(far[:2]), collate(near), collate(far[2:])]
    result, gradient, moved = parts(optimizer, window, 0.5)
    assert {name for name in gradient if "layers.0." not in name} == set()
    for name, value in gradient.items():
        torch.testing.assert_close(value, first[name], rtol=1e-3, atol=1e-4)
    assert {name for name, value in moved.items() if value.any()} == OUTSIDE
    for name, value in along.items():
        torch.testing.assert_close(moved[name], -0.5 * 0.3 * slope * value, rtol=2e-2, atol=1e-3)
    assert result.document_loss_D.shape == (8,)
    expected = [by_hand(model, [row])[0] for row in [*far[:2], *near, *far[2:]]]
    torch.testing.assert_close(
        result.document_loss_D.double() / result.document_tokens_D,
        torch.tensor(expected).double(),
        rtol=2e-3,
        atol=2e-3,
    )
    assert result.answer_tokens == result.document_tokens_D.sum()


@pytest.mark.parametrize(
    ("bits", "stay", "close"), [(8, 4, {"rtol": 1e-4, "atol": 1e-5}), (None, 2, {"rtol": 0, "atol": 0})]
)
def test_without_its_term_it_is_badam_on_the_weights_that_are_held(bits, stay, close):
    """Held whole, over several layers."""
    ours = begun(share=0.0, block_steps=stay, order="ascending", bits=bits)
    method = technique("badam", block_steps=stay, order="ascending")
    plain = llama(3)
    plain.load_state_dict(released(ours.model).state_dict())
    theirs = method.optimizer(method.wrap(plain).train(), TrainConfig(), 1e-2, 5)
    for window in windows(4):
        ours.step(window, 1e-2, clip=1.0)
        theirs.step(window, 1e-2, clip=1.0)
    for name, value in released(ours.model).state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], **close)


def test_one_layer_stands_whole_and_leaving_it_packs_what_it_learnt():
    optimizer = begun(block_steps=2, order="ascending", share=0.0)
    before = optimizer.model.model.layers[0].mlp.up_proj.weight.detach().clone()
    for number, window in enumerate(windows(6)):
        optimizer.step(window, 1e-2, clip=1.0)
        for place, layer in enumerate(optimizer.model.model.layers):
            packed = [isinstance(module, PackedLinear) for module in layer.modules()]
            assert sum(packed) == (0 if place == number // 2 else 7)
    learnt = optimizer.model.model.layers[0].mlp.up_proj.weight_as(torch.float32)
    step = before.abs().max() / 127
    assert (learnt - before).abs().max() > step
    held = sum(value.nbytes for name, value in optimizer.tensors().items() if name.startswith("exp_avg"))
    assert held == 8 * sum(item.numel() for item in optimizer.model.model.layers[2].parameters())


def test_rows_read_by_forward_passes_alone_keep_no_activations():
    optimizer = begun(long_tokens=8)
    far = [collate([row]) for row in rows(12) if len(row.input_ids) > 8][:2]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        result = optimizer.step(far, 1e-3, clip=1.0)
    assert result.applied
    assert not kept


def test_a_window_of_long_rows_alone_or_of_short_rows_alone_is_a_step():
    for long_tokens in (2, 64):
        optimizer = begun(long_tokens=long_tokens, share=0.5)
        before = {name: value.detach().clone() for name, value in optimizer.model.named_parameters()}
        assert optimizer.step(windows(1)[0], 1e-2, clip=1.0).applied
        assert optimizer.updates == (long_tokens == 64)  # of AdamW
        moved = {name for name, value in optimizer.model.named_parameters() if not torch.equal(before[name], value)}
        assert moved == (set(trainable(optimizer.model)) if long_tokens == 64 else OUTSIDE)


def test_an_embedding_at_hand_has_adamw_alone_and_otherwise_its_slope():
    optimizer = begun(block_steps=2, order="ascending", embeddings=True)
    for embedding_at_hand in (True, False):
        optimizer.step(windows(1)[0], 1e-2, clip=1.0)
        _, gradient, moved = parts(optimizer, windows(1)[0], 1e-2)
        assert ("model.embed_tokens.weight" in gradient) is embedding_at_hand
        assert bool(moved["model.embed_tokens.weight"].any()) is not embedding_at_hand
        assert moved["model.norm.weight"].any()


def test_a_step_that_is_not_finite_is_not_applied():
    optimizer = begun()
    before = {name: value.detach().clone() for name, value in trainable(optimizer.model).items()}
    handle = optimizer.model.model.norm.register_forward_hook(lambda module, inputs, out: out * float("nan"))
    result = optimizer.step(windows(1)[0], 1e-2, clip=1.0)
    handle.remove()
    assert not result.applied
    assert optimizer.updates == 0
    assert all(torch.equal(before[name], value) for name, value in trainable(optimizer.model).items())


def test_its_plan_needs_less_on_long_rows_than_mezo(tmp_path):
    """The least of its parts there: `benchmarks.memory` holds it beside all three."""
    pin = pinned(tmp_path / "m", 8, hidden=64)

    def peak(method, **settings):
        shape = Shape(technique(method, **settings), "float32", 64, 8, False)
        phases = Estimator(pin, TrainConfig(), "cpu").phases(shape, 1, 2)
        return max(item.total - item.process for item in phases.values())

    assert peak("hybrid", bits=4, long_tokens=16) < peak("mezo")


def test_merging_gives_the_plain_model_that_is_held(tmp_path):
    pin = pinned(tmp_path / "m", 2)
    method = technique("hybrid", bits=4)
    model = method.wrap(load_model(pin))
    ids = collate(rows(2)).input_ids_BT
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        merged = method.merge(model)
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
        assert (load_model(pin)(input_ids=ids).logits - expected).abs().max() > 1e-2
    assert not any(isinstance(module, PackedLinear) for module in merged.modules())
