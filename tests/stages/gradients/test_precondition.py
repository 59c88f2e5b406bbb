"""The mean gradient and Adam's preconditioner against the explicit computation and against torch's own AdamW."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_contracts.errors import ArtifactError, InputError
from stages.gradients.inner_product import InnerProducts
from stages.gradients.precondition import mean_gradient, precondition
from stages.model.batch import Row, collate
from tests.stages.gradients.small_models import rows_of, tiny_llama, with_lora
from tests.stages.gradients.test_inner_product import explicit_gradient


def test_the_mean_gradient_is_the_mean_over_examples_of_their_mean_loss_gradients() -> None:
    model, rows = with_lora(tiny_llama()), rows_of(7)
    found, losses, count = mean_gradient(model, [collate(rows[:3]), collate(rows[3:])])
    explicit = [explicit_gradient(model, row) for row in rows]
    assert count == 7
    np.testing.assert_allclose(losses, [loss / tokens for _, loss, tokens in explicit], rtol=1e-12)
    for name, value in found.items():
        expected = sum(gradient[name] / tokens for gradient, _, tokens in explicit) / len(rows)
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-14)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_target_example_without_a_token_to_predict_is_refused_by_name() -> None:
    empty = Row("y1", np.array([3, 4, 5]), np.array([True, False, False]))
    with pytest.raises(InputError, match="no supervised token, the first is y1"):
        mean_gradient(tiny_llama(), [collate([*rows_of(2), empty])])


def test_the_preconditioned_direction_is_what_adamw_divides_by() -> None:
    """One AdamW step with β₁ = 0 moves a weight by −lr · g / (√v̂ + ε): its v̂ after the step is our D's."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.0, 0.99), eps=1e-6, weight_decay=0.0)
    for _ in range(4):
        weight.grad = torch.randn_like(weight)
        before = weight.detach().clone()
        optimizer.step()
    state = optimizer.state[weight]
    moments = {"w": (state["exp_avg"], state["exp_avg_sq"])}
    found = precondition({"w": weight.grad}, moments, 4, beta2=0.99, epsilon=1e-6)["w"]
    torch.testing.assert_close(-0.1 * found, weight.detach() - before, rtol=1e-9, atol=1e-12)


def test_influence_is_the_explicit_preconditioned_product_in_float64() -> None:
    for model in (tiny_llama(), with_lora(tiny_llama())):
        pool, target = rows_of(6, seed=1), rows_of(4, seed=2)
        gradient, _, _ = mean_gradient(model, [collate(target)])
        torch.manual_seed(3)
        moments = {name: (value, torch.rand_like(value) * 1e-4 + 1e-9) for name, value in gradient.items()}
        direction = precondition(gradient, moments, 5)
        with InnerProducts(model, {name: value[None] for name, value in direction.items()}) as products:
            found = products.of(collate(pool))
        scores = found.product_DJ[:, 0] / found.answer_tokens_D
        targets = [explicit_gradient(model, row) for row in target]
        expected = []
        for row in pool:
            own, _, tokens = explicit_gradient(model, row)
            total = 0.0
            for name, value in own.items():
                mean = sum(g[name] / n for g, _, n in targets) / len(targets)
                root = torch.sqrt(moments[name][1] / (1 - 0.999**5)) + 1e-8
                total += float((value / tokens * mean / root).sum())
            expected.append(total)
        np.testing.assert_allclose(scores, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())


def test_an_element_that_never_had_a_gradient_has_no_say() -> None:
    gradient = {"w": torch.tensor([1.0, 2.0])}
    moments = {"w": (torch.zeros(2), torch.tensor([0.0, 4.0]))}
    assert precondition(gradient, moments, 10**6, epsilon=0.0)["w"].tolist() == [0.0, 1.0]


def test_moments_of_another_parameterisation_are_refused() -> None:
    gradient = {"w": torch.ones(2)}
    with pytest.raises(ArtifactError, match="it has none"):
        precondition(gradient, {}, 1)
    with pytest.raises(ArtifactError, match="shape"):
        precondition(gradient, {"w": (torch.ones(3), torch.ones(3))}, 1)
    with pytest.raises(ArtifactError, match="0 updates"):
        precondition(gradient, {"w": (torch.ones(2), torch.ones(2))}, 0)
