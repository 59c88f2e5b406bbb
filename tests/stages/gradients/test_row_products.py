"""Products read from a training pass against explicit per-example gradients, in float64; training itself is unmoved."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from data_contracts.errors import ModelError
from stages.gradients import row_products
from stages.gradients.row_products import RowProducts, covered
from stages.model.batch import Row, TokenBatch, collate
from stages.model.loss import document_losses
from stages.model.packing import collate_packed, pack
from tests.stages.gradients.small_models import rows_of, tiny_llama
from tests.stages.gradients.test_inner_product import MODELS, error, explicit_gradient


def direction_for(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(7)
    named = dict(model.named_parameters())
    return {name: torch.randn_like(named[name]) for name in covered(model)}


def oracle(model: nn.Module, rows: Sequence[Row], direction: dict[str, Tensor]) -> Tensor:
    explicit = [explicit_gradient(model, row)[0] for row in rows]
    return torch.stack(
        [sum((value * gradient[name]).sum() for name, value in direction.items()) for gradient in explicit]
    )  # type: ignore[arg-type]


def train_pass(model: nn.Module, batch: TokenBatch, chunk: int | None = None) -> dict[str, Tensor]:
    """Return the gradients of the weighted loss, as training takes them."""
    model.zero_grad(set_to_none=True)
    loss_sum_D, _ = document_losses(model, batch, chunk_tokens=chunk)
    (loss_sum_D * batch.weights_D.to(loss_sum_D.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def batch_of(rows: Sequence[Row], packed: bool) -> tuple[TokenBatch, list[Row]]:
    """Return the batch and its documents' rows in order."""
    packs = pack(rows, 50) if packed else [[index] for index in range(len(rows))]
    order = [rows[index] for group in packs for index in group]
    return (collate_packed([[rows[i] for i in group] for group in packs]) if packed else collate(rows)), order


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("longest", [6, 40])
@pytest.mark.parametrize("name", MODELS)
def test_products_equal_explicit_gradients_and_training_gets_its_own(
    name: str, longest: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows are contracted, long ones formed."""
    monkeypatch.setattr(row_products, "LEAST_ROWS", 8)
    model, (batch, rows) = MODELS[name](), batch_of(rows_of(9, longest=longest), packed)
    expected, direction = train_pass(model, batch), direction_for(model)
    with RowProducts(model, direction) as products:
        products.begin(batch)
        found = train_pass(model, batch)
        product_D = products.take()
    assert error(product_D, oracle(model, rows, direction)) < 1e-12
    assert set(found) == set(expected)
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-10, atol=1e-12)
    assert products.extra_flops > 0
    for parameter, gradient in train_pass(model, batch).items():  # outside the context nothing is left
        assert torch.equal(gradient, expected[parameter])


@pytest.mark.parametrize("least", [0, 10**9])
@pytest.mark.parametrize("chunk", [None, 7])
def test_both_forms_agree_however_the_head_is_cut_and_however_much_is_held(
    least: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_products, "LEAST_ROWS", least)
    monkeypatch.setattr(row_products, "CACHED_BYTES", 1)
    model, rows = tiny_llama(), rows_of(5, seed=4)
    direction = direction_for(model)
    with RowProducts(model, direction) as products:
        products.begin(collate(rows))
        train_pass(model, collate(rows), chunk)
    assert error(products.take(), oracle(model, rows, direction)) < 1e-12


def test_activation_checkpointing_changes_nothing() -> None:
    model, rows = tiny_llama(), rows_of(5, seed=4)
    direction = direction_for(model)
    expected = oracle(model, rows, direction)
    model.train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    with RowProducts(model, direction) as products:
        products.begin(collate(rows))
        train_pass(model, collate(rows))
    assert error(products.take(), expected) < 1e-12


def test_a_documents_weight_multiplies_its_product() -> None:
    model = tiny_llama()
    rows = [
        Row(row.example_id, row.input_ids, row.answer_mask, w)
        for row, w in zip(rows_of(3), (2.0, 0.0, 0.5), strict=True)
    ]
    direction = direction_for(model)
    with RowProducts(model, direction) as products:
        products.begin(collate(rows))
        train_pass(model, collate(rows))
    expected = oracle(model, rows, direction) * torch.tensor([2.0, 0.0, 0.5])
    assert error(products.take(), expected) < 1e-12


def test_under_bfloat16_products_are_those_of_float32_to_its_precision() -> None:
    model, rows = tiny_llama(exact=False).float(), rows_of(6, longest=40)
    direction = direction_for(model)
    found = []
    for enabled in (False, True):
        with RowProducts(model, direction) as products, torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            products.begin(collate(rows))
            train_pass(model, collate(rows))
            found.append(products.take())
    assert 0 < error(found[1], found[0]) < 0.1


def test_matrices_and_biases_count_and_the_scales_of_norms_do_not() -> None:
    model = tiny_llama()
    assert {name for name, _ in model.named_parameters()} - set(covered(model)) == {
        name for name, _ in model.named_parameters() if "norm" in name
    }


def test_a_layer_that_sees_other_rows_than_the_batchs_is_refused() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.extra = tiny_llama(), nn.Linear(16, 16).double()

    model, batch = Pooled(), collate(rows_of(3))
    direction = {"extra.weight": torch.ones(16, 16, dtype=torch.float64)}
    model.get_output_embeddings = lambda: None  # type: ignore[attr-defined]
    with RowProducts(model, direction) as products:
        products.begin(batch)
        with pytest.raises(ModelError, match="one row a token"):
            model.extra(torch.ones(7, 16, dtype=torch.float64))
