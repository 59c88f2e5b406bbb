"""Whole per-example gradients against autograd, one example at a time, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from data_contracts.errors import ModelError
from stages.gradients import examples
from stages.gradients.examples import ExampleGradients
from stages.model import loss
from stages.model.batch import TokenBatch, collate
from tests.stages.gradients.small_models import rows_of, tiny_llama
from tests.stages.gradients.test_inner_product import MODELS, explicit_gradient


def gathered(found: ExampleGradients, batch: TokenBatch) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Return gradient_DP by name; every document of every parameter must be handed over once."""
    parts: dict[str, Tensor] = {}
    met: dict[str, list[int]] = {}

    def take(name: str, some: slice, gradient_dP: Tensor) -> None:
        whole = parts.setdefault(name, torch.zeros(batch.shape[0], gradient_dP.shape[1], dtype=gradient_dP.dtype))
        whole[some] = gradient_dP
        met.setdefault(name, []).extend(range(some.start, some.stop))

    losses = found.of(batch, take)
    assert all(documents == list(range(batch.shape[0])) for documents in met.values())
    return parts, losses


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameters_gradient_is_that_of_autograd(
    name: str, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pieces:
        monkeypatch.setattr(loss, "LOGIT_BYTES", 4 * 61 * 7)
        monkeypatch.setattr(examples, "FORMED_BYTES", 4 * 16 * 24 * 2)
    model, rows = MODELS[name](), rows_of(5, seed=3)
    with ExampleGradients(model) as found:
        parts, (loss_sum_D, answer_tokens_D) = gathered(found, collate(rows, pad_to=19))
    assert set(parts) == {name for name, value in model.named_parameters() if value.requires_grad}
    for index, row in enumerate(rows):
        gradient, explicit_loss, tokens = explicit_gradient(model, row)
        for parameter, value in gradient.items():
            scale = float(value.abs().max()) + 1e-12
            torch.testing.assert_close(parts[parameter][index], value.flatten(), rtol=1e-9, atol=1e-10 * scale)
        assert float(loss_sum_D[index]) == pytest.approx(explicit_loss, rel=1e-12)
        assert int(answer_tokens_D[index]) == tokens


def test_a_layer_that_is_called_twice_is_refused() -> None:
    model = tiny_llama()
    model.model.layers[1] = model.model.layers[0]
    with ExampleGradients(model) as found, pytest.raises(ModelError, match="called once a pass"):
        found.of(collate(rows_of(2)), lambda *_: None)
