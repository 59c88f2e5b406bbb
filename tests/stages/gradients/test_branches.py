"""Differences by branches beside adapters, against explicit float64 gradients, on float and on quantised weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import spearmanr
from torch import Tensor, nn

from stages.gradients.branches import Branches, differences_of
from stages.gradients.differences import Differences
from stages.model.batch import collate
from stages.model.loss import document_losses
from tests.stages.gradients.small_models import rows_of, tiny_llama, with_lora
from tests.stages.gradients.test_inner_product import directions_for, error, explicit_gradient, oracle


class Int8Linear(nn.Module):
    """A frozen linear layer that holds int8 and a scale an output: weights of one byte, dequantised when used."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale_o1 = layer.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale_o1", scale_o1)
        self.register_buffer("code_oi", torch.round(layer.weight.detach() / scale_o1).to(torch.int8))

    def forward(self, given: Tensor) -> Tensor:
        return nn.functional.linear(given, self.dequantised(given.dtype))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        return self.code_oi.to(dtype) * self.scale_o1.to(dtype)


def quantised(model: Any) -> Any:
    """Hold every frozen linear layer inside the adapters, and those beside them, in int8."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            frozen = type(child) is nn.Linear and not child.weight.requires_grad
            if frozen and child is not model.get_base_model().lm_head:
                setattr(parent, name, Int8Linear(child))
    return model


@pytest.mark.parametrize("groups", [1, 3])
def test_they_are_the_differences_of_moved_weights_and_no_weight_is_written(groups: int) -> None:
    model, rows = with_lora(tiny_llama()), rows_of(7, seed=4)
    directions = directions_for(model, groups)
    versions = {name: value._version for name, value in model.named_parameters()}
    for central in (True, False):
        found = differences_of(model, directions, None, central=central)
        assert isinstance(found, Branches)
        found.step_J = [1e-4] * groups
        product_DJ, loss_D, tokens_D = found.of(collate(rows))
        assert {name: value._version for name, value in model.named_parameters()} == versions
        moved = Differences(model, directions, None, central=central)
        moved.step_J = found.step_J
        expected_DJ, expected_D, expected_tokens_D = moved.of(collate(rows))
        assert error(product_DJ, expected_DJ) < 1e-9
        np.testing.assert_allclose(loss_D, expected_D, rtol=1e-12)
        assert torch.equal(tokens_D, expected_tokens_D)
        assert error(product_DJ, oracle(model, rows, directions)) < (1e-6 if central else 1e-2)
        versions = {name: value._version for name, value in model.named_parameters()}


def test_on_int8_weights_they_rank_as_float64_gradients_of_the_dequantised_model_do() -> None:
    """The direction too comes of the quantised model: a preconditioned mean gradient of eight rows."""
    torch.manual_seed(0)
    exact = quantised(with_lora(tiny_llama()))
    model = quantised(with_lora(tiny_llama(exact=False))).float()
    model.load_state_dict(exact.state_dict())
    assert sum(value.numel() for value in model.buffers() if value.dtype == torch.int8) == 2 * (
        2 * 256 + 2 * 128 + 1152
    )
    pool, target = rows_of(40, seed=8), rows_of(8, seed=9)
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    loss_D, tokens_D = document_losses(model, collate(target))
    scale = {name: torch.rand_like(value) + 0.1 for name, value in named.items()}
    gradients = torch.autograd.grad((loss_D / tokens_D).mean(), list(named.values()))
    directions = {n: (g / scale[n])[None] for n, g in zip(named, gradients, strict=True)}
    found = differences_of(model, directions, None, central=True)
    assert isinstance(found, Branches)
    found.step_J = [1e-3]
    product_D = found.of(collate(pool))[0][:, 0]
    goal: dict[str, Tensor] = {}
    for row in target:
        gradient, _, tokens = explicit_gradient(exact, row)
        for name, value in gradient.items():
            goal[name] = goal.get(name, torch.zeros_like(value)) + value / tokens / len(target) / scale[name].double()
    expected_D = oracle(exact, pool, {name: value[None] for name, value in goal.items()})[:, 0]
    assert spearmanr(product_D, expected_D).statistic > 0.99
    assert error(product_D, expected_D) < 0.01
    plain = with_lora(tiny_llama())  # quantisation is seen: the float model's influence is another
    other_D = oracle(plain, pool, {name: value[None] for name, value in goal.items()})[:, 0]
    assert error(other_D, expected_D) > 0.01


def test_what_is_no_linear_adapter_is_moved_itself() -> None:
    base = tiny_llama()
    assert type(differences_of(base, directions_for(base, 1), None, central=True)) is Differences
    dora = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)).double().eval()
    assert type(differences_of(dora, directions_for(dora, 1), None, central=True)) is Differences


def test_the_branches_are_counted() -> None:
    model = with_lora(tiny_llama())
    batch = collate(rows_of(3, seed=1))
    sides = 2 * (2 * (3 * 16 + 16 * 3) + (3 * 24 + 16 * 3)) - 2 * (3 * 8)  # q, v (8 outputs) and down, of two layers
    tokens = batch.shape[0] * batch.shape[1]
    for central, times in ((True, 4), (False, 2)):
        found = differences_of(model, directions_for(model, 2), None, central=central)
        assert found.extra_flops(batch) == times * 2 * tokens * sides
