"""Gradient norms of a batch against explicit per-example gradients by autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from data_contracts.errors import ModelError
from stages.gradients import norms
from stages.gradients.norms import GradientNorms, squared_norms
from stages.model.batch import collate
from tests.stages.gradients.small_models import rows_of, tiny_gpt2, tiny_llama, with_lora
from tests.stages.gradients.test_inner_product import explicit_gradient

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama, tied": tiny_llama,
    "llama, untied": lambda: tiny_llama(tied=False),
    "llama, LoRA": lambda: with_lora(tiny_llama()),
    "gpt2": tiny_gpt2,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("longest", [5, 40])
def test_norms_equal_those_of_explicit_gradients(name: str, longest: int) -> None:
    """Short rows take the Gram form in most layers, long ones the formed gradient."""
    model, rows = MODELS[name](), rows_of(7, seed=3, longest=longest)
    with GradientNorms(model) as found:
        norm_D, loss_sum_D, answer_tokens_D = found.of(collate(rows))
    layers = [n for n, _ in model.named_parameters() if n in found.parameters]
    for index, row in enumerate(rows):
        gradient, loss, tokens = explicit_gradient(model, row)
        expected = sum(float(gradient[layer].square().sum()) for layer in layers) ** 0.5
        assert float(norm_D[index]) == pytest.approx(expected, rel=1e-6)
        assert float(loss_sum_D[index]) == pytest.approx(loss, rel=1e-6)
        assert int(answer_tokens_D[index]) == tokens


def test_every_linear_layer_of_the_decoder_counts_and_nothing_else() -> None:
    for name, wanted in (("llama, untied", 14), ("llama, LoRA", 12), ("gpt2", 16)):
        with GradientNorms(MODELS[name]()) as found:
            assert len(found.parameters) == wanted  # 7 x 2 layers; 3 x 2 adapters of A and B; 4 x 2 of weight and bias
            assert not [p for p in found.parameters if "embed" in p or "lm_head" in p or "norm" in p or "ln_" in p]


@pytest.mark.parametrize("held", [1, 10**9])
def test_both_forms_agree_however_many_documents_are_held_at_once(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "FORMED_BYTES", held)
    torch.manual_seed(0)
    for length in (3, 30):  # Gram for 3 x (8 + 12) < 96
        a, b = torch.randn(5, length, 8).double(), torch.randn(5, length, 12).double()
        formed = torch.einsum("dto,dti->doi", b, a)
        torch.testing.assert_close(squared_norms(a, b), formed.square().sum(dim=(1, 2)))


def test_a_model_without_a_trainable_linear_layer_is_refused() -> None:
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    with pytest.raises(ModelError, match="besides the output head"):
        GradientNorms(model)


def test_a_layer_that_is_called_twice_a_pass_is_refused() -> None:
    model = tiny_llama()
    model.model.layers[1] = model.model.layers[0]
    with GradientNorms(model) as found, pytest.raises(ModelError, match="called once a pass"):
        found.of(collate(rows_of(2, seed=1)))
