"""Gradient features against explicit gradients and explicit matrices, in float64, and on real moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from data_contracts.errors import ArtifactError
from stages.gradients.precondition import mean_gradient, precondition
from stages.gradients.projection import Projection, rank_one
from stages.model.batch import collate
from tests.stages.gradients.real_text import UPDATES, warmed_up
from tests.stages.gradients.small_models import rows_of, tiny_gpt2, tiny_llama, with_lora
from tests.stages.gradients.test_inner_product import explicit_gradient

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama, tied": tiny_llama,
    "llama, LoRA": lambda: with_lora(tiny_llama()),
    "gpt2": tiny_gpt2,
}
WHOLE = (10**6, 10**6)
"""More than any layer has: nothing is projected."""


def random_moments(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    return {name: (torch.zeros_like(p), torch.rand_like(p) * 1e-3 + 1e-6) for name, p in model.named_parameters()}


def explicit_feature(found: Projection, model: nn.Module, gradient: dict[str, Tensor], moments: Any) -> Tensor:
    """Return P S_o G S_i Qᵀ written out, S from the moments' row and column sums (three updates, β₂ .98, ε 1e-4)."""
    parts = []
    for name in found.parameters:
        value = gradient[name]
        across = ".c_" in name and value.dim() == 2  # GPT-2 stores (inputs, outputs)
        root = torch.sqrt(moments[name][1] / (1 - 0.98**3)) + 1e-4 if moments else None
        value, root = (value.T, root.T if moments else None) if across else (value, root)
        matrices = [
            torch.eye(n, dtype=torch.float64) if side.matrix_kn is None else side.matrix_kn
            for n, side in zip(value.shape, found._sides[name], strict=True)
        ]
        if value.dim() == 1:
            parts.append(matrices[0] @ (value / root.sqrt() if moments else value))
            continue
        if moments:
            square = root**2
            row, column = square.sum(1) / square.sum().sqrt(), square.sum(0) / square.sum().sqrt()
            value = value / torch.outer(row, column) ** 0.25
        parts.append((matrices[0] @ value @ matrices[1].T).flatten())
    return torch.cat(parts)


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_features_are_explicit_gradients_between_explicit_matrices(name: str, preconditioned: bool) -> None:
    model, rows = MODELS[name](), rows_of(7, seed=3)
    moments = random_moments(model) if preconditioned else None
    found = Projection(model, per_layer=(3, 5), seed=2, moments=moments, updates=3, beta2=0.98, epsilon=1e-4)
    with found:
        feature_DK, loss_sum_D, answer_tokens_D = found.of(collate(rows, pad_to=20))
    assert feature_DK.shape == (7, found.dimensions)
    for row, feature_K, loss, tokens in zip(rows, feature_DK, loss_sum_D, answer_tokens_D, strict=True):
        gradient, explicit_loss, explicit_tokens = explicit_gradient(model, row)
        expected_K = explicit_feature(found, model, gradient, moments)
        torch.testing.assert_close(feature_K, expected_K, rtol=1e-9, atol=1e-9 * float(expected_K.abs().max()))
        torch.testing.assert_close(found.project(gradient), feature_K, rtol=1e-9, atol=1e-9)
        assert float(loss) == pytest.approx(explicit_loss, rel=1e-12)
        assert int(tokens) == explicit_tokens


def test_a_layer_gets_as_many_numbers_as_its_two_sides_leave() -> None:
    found = Projection(with_lora(tiny_llama()), per_layer=(5, 4))
    # 2 layers; A is 3 x 16 (down_proj: 3 x 24), B is 16 x 3 (v_proj: 8 x 3): sides of 3 are kept, others 5 in and 4 out
    assert found.dimensions == 2 * 3 * (3 * 5 + 4 * 3)
    assert found.project({}).tolist() == [0.0] * found.dimensions


def test_products_of_features_are_unbiased_over_seeds_and_so_are_those_with_a_dual() -> None:
    model, rows = tiny_llama(), rows_of(2, seed=4, longest=30)
    moments = random_moments(model)
    (left, _, _), (right, _, _) = (explicit_gradient(model, row) for row in rows)
    direction = precondition(right, moments, 3)
    near, dual = [], []
    whole = Projection(model, per_layer=WHOLE, moments=moments, updates=3)
    for seed in range(150):
        found = Projection(model, per_layer=(6, 6), seed=seed, moments=moments, updates=3)
        near.append(float(found.project(left) @ found.project(right)))
        dual.append(float(found.project(left) @ found.project(direction, dual=True)))
    exact = sum(float((left[name] * direction[name]).sum()) for name in whole.parameters)
    assert float(whole.project(left) @ whole.project(direction, dual=True)) == pytest.approx(exact, rel=1e-10)
    for values, expected in ((near, float(whole.project(left) @ whole.project(right))), (dual, exact)):
        error = np.std(values, ddof=1) / len(values) ** 0.5
        assert abs(np.mean(values) - expected) < 4 * error
        assert error < 0.2 * abs(expected)  # the test can see a wrong expectation


def test_an_outer_product_is_its_own_rank_one_factorisation_and_zero_has_none() -> None:
    row, column = torch.rand(5).double(), torch.rand(7).double()
    found = rank_one(torch.outer(row, column))
    torch.testing.assert_close(torch.outer(*found), torch.outer(row, column))
    assert all(not bool(side.any()) for side in rank_one(torch.zeros(2, 3)))


def test_a_weight_that_never_had_a_gradient_has_no_say() -> None:
    model = tiny_llama()
    moments = random_moments(model)
    name = "model.layers.0.mlp.up_proj.weight"
    moments[name][1][3] = 0.0
    gradient = {name: torch.zeros_like(moments[name][0])}
    gradient[name][3] = 1.0
    found = Projection(model, moments=moments)
    for dual in (False, True):
        feature_K = found.project(gradient, dual=dual)
        assert bool(torch.isfinite(feature_K).all())
        assert not bool(feature_K.any())


def test_moments_of_another_parameterisation_are_refused() -> None:
    model = tiny_llama()
    with pytest.raises(ArtifactError, match="it has none"):
        Projection(model, moments={})


@pytest.mark.shared
def test_on_real_moments_the_rank_one_preconditioner_ranks_as_the_exact_one(shared: Path) -> None:
    model, moments, rows = warmed_up(shared, 104)
    pool, target = rows[:96], rows[96:]
    gradient, _, _ = mean_gradient(model, [collate(target)])
    direction = precondition(gradient, moments, UPDATES)
    found = Projection(model, per_layer=WHOLE, moments=moments, updates=UPDATES)
    with found:
        feature_DK, _, _ = found.of(collate(pool))
    exact = feature_DK @ found.project(direction, dual=True)
    assert spearmanr(feature_DK @ found.project(gradient), exact).statistic > 0.999
    plain = Projection(model, per_layer=WHOLE)
    with plain:
        unscaled = plain.of(collate(pool))[0] @ plain.project(gradient)
    assert spearmanr(unscaled, exact).statistic < 0.998  # so the preconditioner is seen


@pytest.mark.shared
def test_direct_influence_ranks_as_less_does_where_one_example_hardly_moves_the_second_moment(shared: Path) -> None:
    """LESS's Γ = m' / √(v' + ε), its own example's square in v'; unlike a cosine, not divided by its norm."""
    model, moments, rows = warmed_up(shared, 104)
    pool, target = rows[:96], rows[96:]
    gradient, _, _ = mean_gradient(model, [collate(target)])
    settled = {name: (m, v / (1 - 0.999**UPDATES)) for name, (m, v) in moments.items()}
    direction = precondition(gradient, settled, 10**6)
    direct, less = [], []
    for row in pool:
        own, _, tokens = explicit_gradient(model, row)
        gamma = 0.0
        for name, value in own.items():
            g, (m, v) = value / tokens, settled[name]
            update = (0.9 * m + 0.1 * g) / torch.sqrt(0.999 * v + 0.001 * g**2 + 1e-16)
            gamma += float((update * gradient[name]).sum())
        less.append(gamma)
        direct.append(sum(float((value * direction[name]).sum()) for name, value in own.items()) / tokens)
    assert spearmanr(direct, less).statistic > 0.995
