"""FLOPs: against hand-derived closed forms, and against direct counts at other shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from data_contracts.errors import ModelError
from stages.meter.flops import FlopCounter, FlopModel
from stages.meter.formulas import MATMUL_LIKE
from stages.model.batch import collate
from stages.model.loss import document_losses
from tests.stages.model.conftest import rows_of

H, F, L, V, HEADS, KV = 32, 80, 3, 120, 4, 2


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V, hidden_size=H, intermediate_size=F, num_hidden_layers=L, num_attention_heads=HEADS,
            num_key_value_heads=KV, tie_word_embeddings=True, use_cache=False,
        )
    )  # fmt: skip


LINEAR = L * (2 * H * H + 2 * H * (H * KV // HEADS) + 3 * H * F)
"""Weights of linear layers a token goes through: q, o; k, v (grouped); gate, up, down."""


@pytest.mark.parametrize(("rows", "tokens", "answers"), [(1, 8, 3), (3, 17, 20), (5, 100, 499)])
def test_full_training_costs_what_the_closed_form_says(rows: int, tokens: int, answers: int) -> None:
    found = FlopModel.trace(llama(), train=True)
    attention = L * 4 * tokens**2 * H  # scores and values, two operations a multiply-add
    forward = rows * (2 * LINEAR * tokens + attention) + answers * 2 * H * V
    assert found.forward(rows, tokens, answers) == forward
    # backward: twice the matmuls; attention five products of which forward did two, one of them again
    backward = rows * (4 * LINEAR * tokens + attention * 5 // 2) + answers * 4 * H * V
    assert found.train(rows, tokens, answers) == forward + backward


@pytest.mark.parametrize("kind", ["full", "lora", "recomputed", "gpt2"])
def test_the_prediction_equals_a_direct_count_of_the_real_loss(kind: str) -> None:
    model: Any = llama()
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=H, n_head=HEADS, n_layer=2, n_positions=128))
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    if kind == "recomputed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    found = FlopModel.trace(model, train=True)
    for lengths in ((33, 33), (7, 60, 12), (90,)):
        batch = collate(rows_of(*lengths, vocabulary=V))
        answers = len(batch.answers.label_N)
        for chunk in (None, 4):
            with FlopCounter() as counter:
                sums, _ = document_losses(model, batch, chunk_tokens=chunk)
                forward = counter.total
                sums.sum().backward()
            assert found.forward(*batch.shape, answers) == forward
            assert found.train(*batch.shape, answers, chunked=chunk is not None) == counter.total


def test_lora_saves_the_weight_gradients_of_frozen_layers() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    lora, full = FlopModel.trace(model, train=True), FlopModel.trace(llama(), train=True)
    assert lora.forward(2, 50) > full.forward(2, 50)
    assert lora.train(2, 50) - lora.forward(2, 50) < full.train(2, 50) - full.forward(2, 50)


def test_recomputation_costs_at_most_another_forward_pass() -> None:
    model = llama()
    plain = FlopModel.trace(model, train=True).train(2, 50)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = FlopModel.trace(model, train=True)
    assert plain < again.train(2, 50) <= plain + again.forward(2, 50, 0)
    assert model.training  # as it was


def test_the_int8_product_is_counted_and_an_unknown_product_is_an_error() -> None:
    a, b = torch.ones(32, 64, dtype=torch.int8), torch.ones(64, 48, dtype=torch.int8)
    with FlopCounter() as counter:
        torch._int_mm(a, b)
    assert counter.total == 2 * 32 * 64 * 48
    with pytest.raises(ModelError, match="mv"), FlopCounter():
        torch.mv(torch.ones(3, 8), torch.ones(8))


def square(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64) * 3 + 0.1


def row(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + math.prod(shape), dtype=torch.float64).reshape(shape)


OPERATORS: dict[str, tuple[Callable[[], Any], int]] = {
    "dot": (lambda: torch.dot(row(7), row(7)), 2 * 7),
    "vdot": (lambda: torch.vdot(row(7), row(7)), 2 * 7),
    "inner": (lambda: torch.inner(row(7), row(7)), 2 * 7),
    "vecdot": (lambda: torch.linalg.vecdot(row(5, 7), row(7)), 2 * 5 * 7),
    "ger": (lambda: torch.ger(row(5), row(7)), 2 * 5 * 7),
    "outer": (lambda: row(5).outer(row(7)), 2 * 5 * 7),
    "addr": (lambda: torch.addr(row(5, 7), row(5), row(7)), 2 * 5 * 7),
    "addr_": (lambda: row(5, 7).addr_(row(5), row(7)), 2 * 5 * 7),
    "cdist of few": (lambda: torch.cdist(row(2, 4, 3), row(2, 5, 3)), 2 * 2 * 4 * 5 * 3),
    "cdist by a product": (lambda: torch.cdist(row(40, 3), row(50, 3)), 2 * 40 * 50 * 3),
    "cdist of corners": (lambda: torch.cdist(row(4, 3), row(5, 3), p=1.0), 2 * 4 * 5 * 3),
    "svd thin": (lambda: torch.linalg.svd(row(6, 4), full_matrices=False), 6 * 6 * 16 + 20 * 64),
    "svd of a wide one": (lambda: torch.linalg.svd(row(4, 6), full_matrices=False), 6 * 6 * 16 + 20 * 64),
    "svd whole": (lambda: torch.linalg.svd(row(6, 4)), 4 * 36 * 4 + 22 * 64),
    "qr": (lambda: torch.linalg.qr(row(3, 6, 3)), 3 * 2 * (2 * 6 * 9 - 18)),  # 2 m n² − 2 n³/3, for R and for Q
    "qr, R alone": (lambda: torch.linalg.qr(row(6, 3), mode="r"), 2 * 6 * 9 - 18),
    "qr complete": (lambda: torch.linalg.qr(row(6, 3), mode="complete"), 90 + 4 * 36 * 3 - 2 * 12 * 9 + 36),
    "solve": (lambda: torch.linalg.solve(square(6), row(6, 5)), 2 * 216 // 3 + 2 * 36 * 5),
    "solve one": (lambda: torch.linalg.solve(square(6), row(6)), 2 * 216 // 3 + 2 * 36),
    "lu": (lambda: torch.linalg.lu_factor(square(6)[:, :3]), 6 * 9 - 9),  # m n² − n³/3
    "cholesky": (lambda: torch.linalg.cholesky(square(6)), 216 // 3),
    "cholesky_solve": (lambda: torch.cholesky_solve(row(6, 5), square(6)), 2 * 36 * 5),
    "solve_triangular": (lambda: torch.linalg.solve_triangular(square(6), row(6, 5), upper=True), 36 * 5),
    "inv": (lambda: torch.linalg.inv(square(6)), 2 * 216),
    "eigh": (lambda: torch.linalg.eigh(square(6)), 9 * 216),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_made_of_products_is_counted_as_by_hand(name: str) -> None:
    run, operations = OPERATORS[name]
    with FlopCounter() as counter:
        run()
    assert counter.total == operations


def test_the_way_back_through_a_factorisation_or_a_distance_is_counted_or_refused() -> None:
    one, other = row(4, 3).requires_grad_(), row(5, 3) * 2
    with FlopCounter() as counter:
        torch.cdist(one, other).sum().backward()
    assert counter.total == 2 * (2 * 4 * 5 * 3)
    matrix = square(6).requires_grad_()
    with pytest.raises(ModelError, match="lu_solve"), FlopCounter():
        torch.linalg.solve(matrix, row(6, 5)).sum().backward()


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.linalg.det(square(4)),
        lambda: torch.linalg.pinv(square(4)),
        lambda: torch.linalg.eig(square(4)),
        lambda: torch.linalg.lstsq(row(4, 3), row(4, 1)),
        lambda: torch.linalg.matrix_exp(square(4)),
        lambda: torch.geqrf(row(4, 3)),
        lambda: torch.pdist(row(4, 3)),
        lambda: torch.nn.functional.bilinear(row(4, 3), row(4, 3), row(2, 3, 3)),
        lambda: torch.sparse.mm(row(4, 4).to_sparse(), row(4, 4)),
    ],
)
def test_what_looks_like_a_product_and_has_no_formula_is_an_error(run: Callable[[], Any]) -> None:
    with pytest.raises(ModelError, match="has none"), FlopCounter():
        run()


def test_names_of_kernels_that_multiply_are_told_from_those_that_do_not() -> None:
    for name in ("gemv_4bit", "mkldnn_linear", "_linear_pointwise", "_weight_int4pack_mm", "_scaled_mm", "smm", "vdot",
                 "_flash_attn_forward", "mkldnn_rnn_layer", "triangular_solve", "linalg_lu_solve", "_sparse_addmm"):  # fmt: skip
        assert MATMUL_LIKE.search(name), name
    for name in ("add", "mul", "embedding", "upsample_linear1d", "upsample_bilinear2d", "linalg_vector_norm", "linspace",
                 "_linalg_check_errors", "linalg_cross", "lu_unpack", "native_layer_norm", "cumsum", "addcmul"):  # fmt: skip
        assert not MATMUL_LIKE.search(name), name


def test_attention_costs_the_same_by_the_kernels_of_a_gpu_and_of_a_cpu() -> None:
    """Every other product is one operator on both; a query of 17 and keys of 29 tokens tell their places apart."""
    query, key = torch.empty(2, 4, 17, 8), torch.empty(2, 4, 29, 8)
    ops, expected = torch.ops.aten, 2 * 4 * 17 * 29 * 8
    kernels: Any = {
        "flash": (ops._scaled_dot_product_flash_attention, ops._scaled_dot_product_flash_attention_backward),
        "efficient": (
            ops._scaled_dot_product_efficient_attention,
            ops._scaled_dot_product_efficient_attention_backward,
        ),
        "cudnn": (ops._scaled_dot_product_cudnn_attention, ops._scaled_dot_product_cudnn_attention_backward),
        "cpu": (
            ops._scaled_dot_product_flash_attention_for_cpu,
            ops._scaled_dot_product_flash_attention_for_cpu_backward,
        ),
    }
    registry = FlopCounter().flop_registry
    for name, (forward, backward) in kernels.items():
        assert registry[forward](query, key, key, out_val=query) == 2 * 2 * expected, name
        assert registry[backward](query, query, key, key, out_val=query) == 5 * 2 * expected, name


def test_a_model_traced_forward_only_has_no_price_for_training() -> None:
    found = FlopModel.trace(llama(), train=False)
    assert found.forward(1, 10) == FlopModel.trace(llama(), train=True).forward(1, 10)
    with pytest.raises(ModelError, match="train=True"):
        found.train(1, 10)


def test_depth_is_exactly_linear() -> None:
    traced = []
    for layers in (1, 2, 7):
        config = llama().config
        config.num_hidden_layers = layers
        traced.append(FlopModel.trace(LlamaForCausalLM(config), train=True))
    assert traced[0].deepened(traced[1], 6) == traced[2]
