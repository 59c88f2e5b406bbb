"""Losses by document: against plain cross-entropy, across batches, chunks and packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from data_contracts.config import ModelConfig
from data_contracts.errors import ModelError
from data_contracts.records import ModelPin
from stages.model.batch import Row, collate
from stages.model.load import load_model, pin_model
from stages.model.loss import document_losses, verify_head
from stages.model.packing import attention_mask_for, collate_packed, pack
from tests.stages.model.conftest import rows_of

pytestmark = pytest.mark.shared
LENGTHS = (30, 7, 50, 12, 3, 2)


def plain_loss(model: Any, row: Row) -> tuple[torch.Tensor, int]:
    """One row by itself, through the model's own logits: the oracle."""
    ids = torch.tensor(row.input_ids)[None]
    logits = model(input_ids=ids).logits[0]
    chosen = np.flatnonzero(row.answer_mask[1:]) + 1
    return functional.cross_entropy(logits[chosen - 1], ids[0, chosen], reduction="sum"), len(chosen)


def test_sums_and_counts_are_those_of_each_row_by_itself(model64: Any) -> None:
    rows = rows_of(*LENGTHS)
    sums, counts = document_losses(model64, collate(rows))
    expected = [plain_loss(model64, row) for row in rows]
    assert counts.tolist() == [count for _, count in expected]
    torch.testing.assert_close(sums, torch.stack([loss for loss, _ in expected]), rtol=1e-12, atol=1e-10)


def test_the_chunked_loss_and_its_gradient_equal_the_plain_one(model64: Any) -> None:
    batch = collate(rows_of(*LENGTHS))
    weights = list(model64.parameters())
    found = []
    for chunk in (None, 7, 1):
        sums, _ = document_losses(model64, batch, chunk_tokens=chunk)
        weighted = (sums * torch.arange(1, len(sums) + 1)).sum()
        found.append((sums.detach(), torch.autograd.grad(weighted, weights)))
    for sums, gradients in found[1:]:
        torch.testing.assert_close(sums, found[0][0], rtol=1e-13, atol=0)
        torch.testing.assert_close(gradients, found[0][1], rtol=1e-9, atol=1e-11)


def test_chunks_hold_no_more_logits_than_asked(model: Any) -> None:
    largest = 0

    def watch(module: Any, inputs: Any, output: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, output.shape[0])

    handle = model.get_output_embeddings().register_forward_hook(watch)
    try:
        document_losses(model, collate(rows_of(*LENGTHS)), chunk_tokens=7)[0].sum().backward()
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)
    assert largest == 7


@pytest.mark.parametrize(("name", "tolerance"), [("model", 1e-5), ("model64", 1e-10)])
def test_packed_equals_unpacked_for_every_document(name: str, tolerance: float, request: pytest.FixtureRequest) -> None:
    model, rows = request.getfixturevalue(name), rows_of(*LENGTHS)
    packs = pack(rows, 60)
    assert len(packs) == 2
    packed, counts = document_losses(model, collate_packed([[rows[i] for i in group] for group in packs], pad_to=64))
    alone, expected = document_losses(model, collate(rows))
    order = [i for group in packs for i in group]
    assert counts.tolist() == expected[order].tolist()
    torch.testing.assert_close(packed, alone[order], rtol=tolerance, atol=tolerance)


def test_a_packed_gradient_equals_the_unpacked_one(model64: Any) -> None:
    rows = rows_of(*LENGTHS)
    packed = collate_packed([[rows[i] for i in group] for group in pack(rows, 60)])
    weights = list(model64.parameters())
    one, two = (
        torch.autograd.grad(document_losses(model64, batch)[0].sum(), weights) for batch in (packed, collate(rows))
    )
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


def test_the_mask_lets_a_token_see_its_own_document_up_to_itself() -> None:
    batch = collate_packed([rows_of(2, 3)], pad_to=6)
    expected = np.zeros((6, 6), dtype=bool)
    for first, last in ((0, 2), (2, 5), (5, 6)):
        for query in range(first, last):
            expected[query, first : query + 1] = True
    assert attention_mask_for(batch)[0, 0].tolist() == expected.tolist()
    assert batch.positions_BT.tolist() == [[0, 1, 0, 1, 2, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_packing_holds_every_row_once_and_no_row_too_many(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = rows_of(*draw.integers(1, 60, size=int(draw.integers(1, 50))).tolist(), seed=seed)
    packs = pack(rows, 60)
    assert sorted(i for group in packs for i in group) == list(range(len(rows)))
    used = [sum(len(rows[i].input_ids) for i in group) for group in packs]
    assert max(used) <= 60
    assert sum(a + b <= 60 for k, a in enumerate(used) for b in used[k + 1 :]) == 0  # else one would have been enough


def test_s02_learned_positions_and_a_left_padding_tokenizer_do_not_matter(shared: Path) -> None:
    folder = next((shared / "cases/files").glob("S02*"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.padding_side == "left"
    model = load_model(pin_model(ModelConfig(path="model"), folder))
    rows = []
    for line in (folder / "pool.jsonl").read_text().splitlines():
        item = json.loads(line)
        full = tokenizer.apply_chat_template(item["messages"], tokenize=True, return_dict=False)
        prompt = tokenizer.apply_chat_template(
            item["messages"][:-1], tokenize=True, return_dict=False, add_generation_prompt=True
        )
        rows.append(Row(item["id"], np.array(full), np.arange(len(full)) >= len(prompt)))
    with torch.no_grad():
        found = {}
        for name, group in (("both", rows), ("turned", rows[::-1]), ("first", rows[:1]), ("second", rows[1:])):
            sums, counts = document_losses(model, collate(group))
            found[name] = dict(zip([row.example_id for row in group], (sums / counts).tolist(), strict=True))
    assert found["both"] == pytest.approx({"b1": 6.294596, "b2": 5.049522}, abs=1e-5)
    assert found["turned"] == pytest.approx(found["both"], abs=1e-5)
    assert found["first"] | found["second"] == pytest.approx(found["both"], abs=1e-5)


def test_a_model_that_does_more_than_project_is_refused(pin: Any) -> None:
    model = load_model(pin)
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output)
    verify_head(model)
    model.register_forward_hook(lambda module, inputs, output: type(output)(logits=output.logits * 2))
    with pytest.raises(ModelError, match="something else"):
        verify_head(model)


def test_weights_that_are_not_numbers_are_told_from_a_head_that_is_none(pin: ModelPin) -> None:
    model = load_model(pin)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="finite"):
        verify_head(model)
