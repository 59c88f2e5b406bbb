"""Addax against its two parts by hand: the gradient of short rows, the central difference of long ones."""

from __future__ import annotations

import copy

import pytest
import torch

from data_contracts.config import TrainConfig
from stages.model.batch import collate
from stages.technique.zeroth import drawn
from tests.stages.technique.setting import llama, rows, technique
from tests.stages.technique.test_step import by_hand

FREE = {"clip": 1e9}


def begun(**settings):
    method = technique("addax", **settings)
    model = method.wrap(llama(2, dtype=torch.float64))
    return method.optimizer(model, TrainConfig(), 1e-2, 5)


def by_difference(model, found, epsilon):
    """Return the central difference of the mean loss along the first window's z, and z."""
    along = {name: drawn(item.shape, item, 5, 0, name) for name, item in model.named_parameters()}
    losses = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        for name, item in moved.named_parameters():
            item.data.add_(along[name], alpha=sign * epsilon)
        losses.append(by_hand(moved, found)[0])
    return (losses[0] - losses[1]) / (2 * epsilon), along


@pytest.mark.parametrize("long_tokens", [None, 14])
def test_a_step_is_the_weighted_sum_of_both_parts_each_of_its_own_rows(long_tokens):
    optimizer = begun(share=0.3, long_tokens=long_tokens)
    model, found = copy.deepcopy(optimizer.model), rows(8)
    near, far = ([row for row in found if (len(row.input_ids) > 14) is long] for long in (False, True))
    assert min(len(near), len(far)) > 2
    _, gradient = by_hand(model, near if long_tokens else found)
    slope, along = by_difference(model, far if long_tokens else found, 1e-3)
    result = optimizer.step([collate(far[:2]), collate(near), collate(far[2:])], 0.5, **FREE)
    for name, item in model.named_parameters():
        moved = optimizer.model.get_parameter(name).detach() - item.detach()
        expected = -0.5 * (0.3 * slope * along[name] + 0.7 * gradient[name])
        torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-8)
    assert optimizer.tensors() == {}
    # a central difference is the mean of two losses within O(eps^2); rows read by backward passes are exact
    assert result.loss == pytest.approx(by_hand(model, found)[0], rel=1e-3)


def test_windows_of_long_rows_alone_and_of_short_rows_alone_are_steps_of_one_part():
    found = rows(4)
    for long_tokens, weight in ((1, 0.3), (64, 0.7)):
        optimizer = begun(share=0.3, long_tokens=long_tokens)
        model = copy.deepcopy(optimizer.model)
        _, gradient = by_hand(model, found)
        slope, along = by_difference(model, found, 1e-3)
        assert optimizer.step([collate(found)], 0.5, **FREE).applied
        for name, item in model.named_parameters():
            moved = optimizer.model.get_parameter(name).detach() - item.detach()
            part = slope * along[name] if long_tokens == 1 else gradient[name]
            torch.testing.assert_close(moved, -0.5 * weight * part, rtol=1e-5, atol=1e-8)


def test_a_window_whose_gradient_is_not_finite_moves_nothing():
    optimizer = begun(long_tokens=14)
    before = copy.deepcopy(optimizer.model.state_dict())
    short = [row for row in rows(8) if len(row.input_ids) <= 14]
    long = [row for row in rows(8) if len(row.input_ids) > 14]
    broken = collate(short)
    broken.weights_D[0] = float("inf")
    assert not optimizer.step([collate(long), broken], 0.5, clip=1.0).applied
    assert all(torch.equal(before[name], value) for name, value in optimizer.model.state_dict().items())


def test_rows_past_the_limit_keep_no_activations_and_no_gradients():
    optimizer, found = begun(long_tokens=14), rows(8)
    far, kept = [collate([row]) for row in found if len(row.input_ids) > 14], []
    with torch.autograd.graph.saved_tensors_hooks(lambda item: kept.append(item.numel()) or item, lambda item: item):
        assert optimizer.step(far, 1e-3, clip=1.0).applied
    assert not kept
    assert all(item.grad is None for item in optimizer.model.parameters())
