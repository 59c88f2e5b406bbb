"""GaLore and APOLLO: shapes of their state, and their updates written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from data_contracts.config import TrainConfig
from stages.technique.projected import LowRankAdam, leading
from stages.technique.zeroth import drawn
from tests.stages.technique.setting import llama, technique, windows

TRAIN = TrainConfig(beta1=0.9, beta2=0.99, epsilon=1e-8)


def begun(kind, shape, **settings):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    values = {"rank": 3, "gap": 2, "scale": 0.25, "tensor_wise": False, "seed": 4} | settings
    return weight, LowRankAdam({"w": weight}, {"w": weight}, TRAIN, kind=kind, **values)


def adam(gradients):
    """Return Adam's normalised update after a list of gradients."""
    first = sum(0.1 * 0.9 ** (len(gradients) - 1 - i) * g for i, g in enumerate(gradients))
    second = sum(0.01 * 0.99 ** (len(gradients) - 1 - i) * g**2 for i, g in enumerate(gradients))
    n = len(gradients)
    return (first / (1 - 0.9**n)) / ((second / (1 - 0.99**n)).sqrt() + 1e-8)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_galore_steps_in_the_leading_directions_of_the_gradient_that_opened_the_gap(shape):
    weight, optimizer = begun("galore", shape)
    optimizer.param_groups[0]["lr"], seen = 0.1, []
    for number in range(4):
        gradient = torch.randn(shape, dtype=torch.float64)
        wide = gradient if shape[0] < shape[1] else gradient.T
        if number % 2 == 0:
            basis = torch.linalg.svd(wide.float())[0][:, :3].double()
        seen.append(basis.T @ wide)
        expected = basis @ adam(seen) * 0.25
        before, weight.grad = weight.detach().clone(), gradient
        optimizer.step()
        moved = (before - weight.detach()) / 0.1
        torch.testing.assert_close(moved if shape[0] < shape[1] else moved.T, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tensor_wise", [False, True])
def test_apollo_stretches_the_gradient_as_the_low_rank_adam_would_and_its_norm_grows_slowly(tensor_wise):
    weight, optimizer = begun("apollo", (10, 6), scale=4.0, tensor_wise=tensor_wise)
    optimizer.param_groups[0]["lr"], seen, norm = 0.1, [], None
    for number in range(4):
        gradient = torch.randn(10, 6, dtype=torch.float64) * (1 + 3 * number)
        low = drawn((3, 6), gradient, 4, number // 2, "w") / math.sqrt(3) @ gradient.T
        seen.append(low)
        after = adam(seen)
        stretch = after.norm() / low.norm() if tensor_wise else after.norm(dim=0) / low.norm(dim=0)
        expected = gradient.T * stretch * 2
        if norm is not None:
            expected = expected * min(1.0, 1.01 * norm / float(expected.norm()))
        norm = float(expected.norm())
        before, weight.grad = weight.detach().clone(), gradient
        optimizer.step()
        torch.testing.assert_close(((before - weight.detach()) / 0.1).T, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("kind", "part"), [("galore", "basis"), ("apollo", "norm")])
def test_the_state_of_a_matrix_is_two_thin_moments_and_a_basis_or_a_norm(kind, part):
    method = technique(kind, rank=4)
    optimizer = method.optimizer(method.wrap(llama(2)).train(), TrainConfig(), 1e-3, 0)
    optimizer.step(windows(1)[0], 1e-3, clip=1.0)
    found = optimizer.tensors()
    for name, item in optimizer.adam.named.items():
        if "_proj" not in name:  # embeddings and norms have plain AdamW
            assert found[f"low.first.{name}"].shape == item.shape
            continue
        small, large = sorted(item.shape)
        assert found[f"low.first.{name}"].shape == found[f"low.second.{name}"].shape == (4, large)
        assert found[f"low.{part}.{name}"].numel() == (small * 4 if kind == "galore" else 1)
    assert not any(name.startswith("exp_avg") for name in found)


def test_a_gradient_without_singular_vectors_leaves_the_basis_that_is_known():
    known = torch.eye(4, 2)
    assert torch.equal(leading(torch.full((4, 6), math.nan), 2, known), known)
    assert leading(torch.full((4, 6), math.nan), 2, None).shape == (4, 2)
    zero = leading(torch.zeros(4, 6), 2, known)
    torch.testing.assert_close(zero.T @ zero, torch.eye(2))
