"""Zeroth-order techniques: the update's direction is the perturbed one, the slope is the derivative, weights come back."""

from __future__ import annotations

import pytest
import torch

from data_contracts.config import TrainConfig
from data_contracts.errors import ModelError
from stages.model.batch import collate
from stages.plan.estimate import Estimator
from stages.plan.trace import Shape
from stages.technique.step import trainable
from tests.stages.technique.setting import llama, pinned, rows, technique, windows
from tests.stages.technique.test_step import by_hand

KINDS = [
    {"method": "mezo"},
    {"method": "lozo", "rank": 3, "interval": 2},
    {"method": "subzero", "rank": 3, "interval": 2},
]
NAMES = [item["method"] for item in KINDS]
FREE = {"clip": 1e9}


def begun(settings, *, dtype=torch.float64, seed=3, **train):
    method = technique(**settings)
    model = method.wrap(llama(2, dtype=dtype))
    return method.optimizer(model, TrainConfig(**train), 1e-2, seed)


class Seen:
    """Notes the weights that a module computes with."""

    def __init__(self, model):
        self.weights = {}
        for name, module in model.named_modules():
            if module._parameters:
                module.forward = self._noting(name, module, module.forward)

    def _noting(self, name, module, forward):
        def run(*args, **kwargs):
            for key, value in module._parameters.items():
                if value is None:
                    continue
                self.weights.setdefault(f"{name}.{key}", []).append(value.detach().clone())
            return forward(*args, **kwargs)

        return run


@pytest.mark.parametrize("settings", KINDS, ids=NAMES)
def test_weights_move_along_the_direction_that_was_perturbed_at_every_window(settings):
    """LOZO's public code draws both factors anew in the perturbation and one of them in the update where V is renewed:
    windows 2 and 4 here."""
    optimizer, rate = begun(settings), 0.5
    seen = Seen(optimizer.model)
    for window in windows(5):
        seen.weights.clear()
        before = {name: value.detach().clone() for name, value in optimizer.named.items()}
        result = optimizer.step(window[:1], rate, **FREE)
        ratios = set()
        for name, value in optimizer.named.items():
            above, below = (seen.weights[name][side] - before[name] for side in (0, 1 if "embed" not in name else -1))
            torch.testing.assert_close(above, -below, rtol=1e-9, atol=1e-12)
            update = value.detach() - before[name]
            factor = float((update * above).sum() / above.square().sum())
            torch.testing.assert_close(update, factor * above, rtol=1e-6, atol=1e-10)
            ratios.add(round(factor / (rate * result.gradient_norm / 1e-3), 6))
        assert ratios in ({1.0}, {-1.0})  # one slope for all weights, its sign either way


@pytest.mark.parametrize("settings", KINDS, ids=NAMES)
def test_the_slope_is_the_derivative_along_the_direction(settings):
    found = rows(4)
    optimizer = begun({**settings, "epsilon": 1e-5})
    loss, gradient = by_hand(optimizer.model, found)
    before = {name: value.detach().clone() for name, value in optimizer.named.items()}
    result = optimizer.step([collate(found[:2]), collate(found[2:])], 1.0, **FREE)
    update = {name: value.detach() - before[name] for name, value in optimizer.named.items()}
    # θ' − θ = −g z and ⟨∇L, z⟩ = g, so ⟨∇L, θ' − θ⟩ = −g²
    along = sum(float((gradient[name] * update[name]).sum()) for name in update)
    assert along == pytest.approx(-(result.gradient_norm**2), rel=1e-6)
    assert result.loss == pytest.approx(loss, rel=1e-8)
    assert result.document_loss_D.sum().item() / result.answer_tokens == pytest.approx(loss, rel=1e-8)


@pytest.mark.parametrize("settings", KINDS, ids=NAMES)
def test_the_mean_of_the_squared_slope_over_directions_is_the_gradients_square(settings):
    """So that the norm it reports and clips is comparable to a gradient's."""
    found = [collate(rows(4))]
    optimizer = begun(settings)
    _, gradient = by_hand(optimizer.model, rows(4))
    square = sum(float(value.square().sum()) for value in gradient.values())
    slopes = [optimizer.step(found, 0.0, **FREE).gradient_norm for _ in range(120)]
    assert sum(slope**2 for slope in slopes) / len(slopes) == pytest.approx(square, rel=0.5)


@pytest.mark.parametrize("settings", KINDS, ids=NAMES)
def test_at_a_rate_of_zero_every_byte_comes_back_also_after_an_error(settings):
    optimizer = begun(settings, dtype=torch.float32)
    before = {name: value.clone() for name, value in optimizer.model.state_dict().items()}
    parameters = dict(optimizer.model.named_parameters())
    for window in windows(3):
        optimizer.step(window, 0.0, clip=1.0)
    handle = optimizer.model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(windows(1)[0], 1.0, clip=1.0)
    handle.remove()
    assert all(torch.equal(before[name], value) for name, value in optimizer.model.state_dict().items())
    assert all(item is parameters[name] for name, item in optimizer.model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in optimizer.model.modules())


def test_a_seed_gives_its_directions_again_and_another_gives_others():
    first, again, other = (begun({"method": "mezo"}, seed=seed) for seed in (1, 1, 2))
    for optimizer in (first, again, other):
        for window in windows(2):
            optimizer.step(window, 1e-2, clip=1.0)
    weights = [torch.cat([item.flatten() for item in o.named.values()]) for o in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2], atol=1e-5)


def test_two_ranks_move_as_one_that_has_the_whole_window():
    whole, found = begun({"method": "mezo"}), windows(1)[0]
    whole.step(found, 1e-2, clip=1.0)
    sent = []
    for share in found:
        begun({"method": "mezo"}).step([share], 0.0, clip=1.0, all_reduce=lambda items: sent.append(items[0].clone()))
    rank = begun({"method": "mezo"})
    rank.step(found[:1], 1e-2, clip=1.0, all_reduce=lambda items: items[0].copy_(sent[0] + sent[1]))
    for name, value in whole.named.items():
        torch.testing.assert_close(rank.named[name], value, rtol=1e-12, atol=1e-14)


def test_momentum_is_the_running_mean_of_the_thin_factor_carried_over_a_new_right_factor():
    optimizer = begun({"method": "lozo", "rank": 2, "interval": 2, "momentum": 0.8, "epsilon": 1e-5})
    name = "model.layers.0.mlp.up_proj.weight"
    weight, expected = optimizer.named[name], torch.zeros(24, 2, dtype=torch.float64)
    for number, window in enumerate(windows(4)):
        left, right = optimizer.factors(name, weight)
        if number == 2:
            old = optimizer.kept_factor(name, weight, 0)
            expected = expected @ old.T @ right / 16
        before = weight.detach().clone()
        slope, _ = optimizer.slope(window, {})
        optimizer.step(window, 0.1, **FREE)
        expected = 0.8 * expected + 0.2 * (-0.1 * slope) * left
        torch.testing.assert_close(weight.detach() - before, expected @ right.T / 2**0.5, rtol=1e-9, atol=1e-12)
    assert sum(item.numel() for item in optimizer.tensors().values()) == 2 * sum(
        item.shape[0] for item in optimizer.named.values() if item.ndim == 2
    )


def test_a_direction_of_a_subspace_is_u_z_v_with_orthonormal_u_and_v_that_stay():
    optimizer = begun({"method": "subzero", "rank": 3, "interval": 2})
    name = "model.layers.0.mlp.up_proj.weight"
    weight, spans = optimizer.named[name], []
    for window in range(4):
        optimizer.windows = window
        z = optimizer.moved(name, torch.zeros_like(weight), 1.0)
        left, values, right = torch.linalg.svd(z, full_matrices=False)
        assert int((values > 1e-9 * values[0]).sum()) == 3
        spans.append((left[:, :3] @ left[:, :3].T, right[:3].T @ right[:3], z))
    for part in (0, 1):
        torch.testing.assert_close(spans[0][part], spans[1][part])
        torch.testing.assert_close(spans[2][part], spans[3][part])
        assert (spans[1][part] - spans[2][part]).abs().max() > 0.1
    assert not torch.allclose(spans[0][2], spans[1][2])
    squares = []
    for window in range(400):
        optimizer.windows = window
        squares.append(optimizer.moved(name, torch.zeros_like(weight), 1.0).square().mean())
    assert torch.stack(squares).mean() == pytest.approx(1.0, rel=0.1)  # E‖z‖² is its number of entries


def test_matrices_decay_and_vectors_do_not():
    optimizer = begun({"method": "mezo"}, weight_decay=0.5)
    before = {name: value.detach().clone() for name, value in optimizer.named.items()}
    optimizer.descend(0.0, 0.1)
    for name, value in optimizer.named.items():
        torch.testing.assert_close(value.detach(), before[name] * (0.95 if value.ndim == 2 else 1.0))


def test_a_weight_that_its_layer_never_uses_is_refused():
    optimizer = begun({"method": "mezo"})
    optimizer.model.model.layers[0].register_module("spare", torch.nn.Linear(2, 2).double())
    optimizer = technique("mezo").optimizer(optimizer.model, TrainConfig(), 1e-2, 0)
    with pytest.raises(ModelError, match="spare"):
        optimizer.step(windows(1)[0], 0.0, clip=1.0)


def test_what_is_planned_is_inference_and_the_largest_weight(tmp_path):
    """No gradients, no moments; beyond weights less than what one micro-batch's logits, one layer's activations and two
    copies of the largest weight take."""
    pin = pinned(tmp_path / "m", 4, hidden=64)
    shape = Shape(technique("mezo"), "float32", 16, 8, False)
    phases = Estimator(pin, TrainConfig(), "cpu").phases(shape, 2, 2)
    full = Estimator(pin, TrainConfig(), "cpu").phases(Shape(technique("full"), "float32", 16, 8, False), 2, 2)
    largest = max(item.numel() for item in trainable(llama(4, hidden=64)).values())
    for phase in phases.values():
        assert phase.moments == phase.gradients == 0
        assert phase.activations < 4 * (2 * largest + 2 * 16 * (4 * 64 + 3 * 64) + 3 * 2 * 8 * 64)
    assert max(p.total - p.process - p.weights for p in phases.values()) < 0.2 * max(
        p.total - p.process - p.weights for p in full.values()
    )
