"""The batched inner products against explicit per-example gradients by autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from data_contracts.errors import ModelError
from stages.gradients import inner_product
from stages.gradients.inner_product import InnerProducts
from stages.model import loss
from stages.model.batch import Row, collate
from stages.model.packing import collate_packed, pack
from tests.stages.gradients.small_models import rows_of, tiny_gpt2, tiny_llama, tiny_qwen3, with_lora

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama, tied": tiny_llama,
    "llama, untied": lambda: tiny_llama(tied=False),
    "llama, tied, with a padding id": lambda: tiny_llama(pad=5),
    "llama, LoRA": lambda: with_lora(tiny_llama()),
    "llama, LoRA and the embedding": lambda: with_lora(tiny_llama(), embedding=True),
    "gpt2": tiny_gpt2,
    "qwen3, a norm a head": tiny_qwen3,
}


def explicit_gradient(model: nn.Module, row: Row) -> tuple[dict[str, Tensor], float, int]:
    """Return one example's gradient of its summed answer loss from the model's own logits: no code under test."""
    ids = torch.from_numpy(row.input_ids)[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
    answer = torch.from_numpy(row.answer_mask)[1:]
    loss = functional.cross_entropy(logits[answer], ids[0, 1:][answer], reduction="sum")
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    filled = {
        name: torch.zeros_like(named[name]) if gradient is None else gradient
        for name, gradient in zip(named, gradients, strict=True)
    }
    return filled, float(loss.detach()), int(answer.sum())


def directions_for(model: nn.Module, groups: int) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {
        name: torch.randn(groups, *parameter.shape, dtype=torch.float64)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def oracle(model: nn.Module, rows: Sequence[Row], directions: dict[str, Tensor]) -> Tensor:
    result = []
    for row in rows:
        gradient, _, _ = explicit_gradient(model, row)
        result.append(sum((directions[name].flatten(1) @ gradient[name].flatten()) for name in directions))
    return torch.stack(result)  # type: ignore[arg-type]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_products_equal_explicit_gradients_in_float64(name: str, groups: int) -> None:
    model, rows = MODELS[name](), rows_of(9)
    directions = directions_for(model, groups)
    expected = oracle(model, rows, directions)
    with InnerProducts(model, directions) as products:
        found = products.of(collate(rows))
    assert error(found.product_DJ, expected) < 1e-12
    losses = [explicit_gradient(model, row)[1:] for row in rows]
    np.testing.assert_allclose(found.loss_sum_D, [loss for loss, _ in losses], rtol=1e-12)
    assert found.answer_tokens_D.tolist() == [count for _, count in losses]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("name", ["llama, tied", "llama, LoRA"])
def test_packed_rows_give_the_products_of_their_documents_apart(name: str, groups: int) -> None:
    model, rows = MODELS[name](), rows_of(11, seed=3)
    directions = directions_for(model, groups)
    packs = pack(rows, 40)
    assert max(map(len, packs)) > 1
    batch = collate_packed([[rows[index] for index in members] for members in packs], pad_to=44)
    with InnerProducts(model, directions) as products:
        found = products.of(batch)
    order = [row.example_id for row in rows]
    expected = oracle(model, rows, directions)[[order.index(example_id) for example_id in batch.example_ids]]
    assert error(found.product_DJ, expected) < 1e-12


def test_a_models_own_float32_norm_keeps_the_error_below_a_millionth() -> None:
    model, rows = tiny_llama(exact=False), rows_of(9)
    directions = directions_for(model, 1)
    with InnerProducts(model, directions) as products:
        found = products.of(collate(rows))
    assert error(found.product_DJ, oracle(model, rows, directions)) < 1e-6


def test_padding_batch_size_and_order_do_not_change_a_product() -> None:
    model, rows = tiny_llama(), rows_of(8, seed=5)
    directions = directions_for(model, 2)
    with InnerProducts(model, directions) as products:
        alone = torch.cat([products.of(collate([row])).product_DJ for row in rows])
        together = products.of(collate(rows, pad_to=50)).product_DJ
        reverse = products.of(collate(rows[::-1])).product_DJ.flip(0)
    assert error(together, alone) < 1e-12
    assert error(reverse, alone) < 1e-12


@pytest.mark.parametrize("groups", [1, 4])
def test_a_head_taken_in_chunks_and_gradients_formed_in_parts_change_nothing(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = tiny_llama(), rows_of(9, seed=2)
    directions = directions_for(model, groups)
    monkeypatch.setattr(loss, "LOGIT_BYTES", 4 * 61 * 7)
    monkeypatch.setattr(inner_product, "FORMED_BYTES", 4 * 16 * 24 * 2)
    with InnerProducts(model, directions) as products:
        found = products.of(collate(rows))
    assert error(found.product_DJ, oracle(model, rows, directions)) < 1e-12


def test_activation_checkpointing_changes_nothing() -> None:
    model, rows = tiny_llama(), rows_of(6, seed=4)
    directions = directions_for(model, 1)
    expected = oracle(model, rows, directions)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode only; there is no dropout here
    with InnerProducts(model, directions) as products:
        found = products.of(collate(rows))
    assert error(found.product_DJ, expected) < 1e-12


def test_a_document_without_a_token_to_predict_gets_zero_and_no_tokens() -> None:
    model = tiny_llama()
    row = Row("only-first", np.array([3, 4]), np.array([True, False]))
    directions = directions_for(model, 1)
    others = rows_of(2)
    with InnerProducts(model, directions) as products:
        found = products.of(collate([row, *others]))
        lone = products.of(collate([row]))
    assert found.product_DJ[0].item() == 0
    assert found.answer_tokens_D[0] == 0
    assert lone.product_DJ.tolist() == [[0.0]]
    assert error(found.product_DJ[1:], oracle(model, others, directions)) < 1e-12


def test_only_the_named_parameters_count_and_the_flags_are_given_back() -> None:
    model, rows = tiny_llama(), rows_of(3)
    model.model.embed_tokens.weight.requires_grad_(False)
    directions = {name: value for name, value in directions_for(model, 1).items() if "layers.1" in name}
    before = [parameter.requires_grad for parameter in model.parameters()]
    with InnerProducts(model, directions) as products:
        found = products.of(collate(rows))
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert error(found.product_DJ, oracle(model, rows, directions)) < 1e-12


def test_a_parameter_that_acts_outside_its_module_is_refused_not_left_out() -> None:
    class Bypassing(nn.Linear):
        """A projection whose scale is read from outside, past every tap."""

    model, rows = tiny_llama(), rows_of(2)
    holder = Bypassing(1, 1, bias=False, dtype=torch.float64)
    norm = model.model.norm
    model.model.outside = holder
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) * holder.weight[0, 0]
    with (
        InnerProducts(model, directions_for(model, 1)) as products,
        pytest.raises(ModelError, match=r"outside\.weight"),
    ):
        products.of(collate(rows))


def test_a_shared_output_of_several_tokens_is_refused() -> None:
    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16, dtype=torch.float64))

        def forward(self, hidden: Tensor) -> Tensor:
            return (hidden.mean(dim=(0, 1)) * self.scale)[None]

    model, rows = tiny_llama(), rows_of(2)
    pooling, norm = Pooling(), model.model.norm
    model.model.pooling = pooling
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) + pooling(hidden)
    with InnerProducts(model, directions_for(model, 1)) as products, pytest.raises(ModelError, match="Pooling"):
        products.of(collate(rows))
