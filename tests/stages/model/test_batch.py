"""Batches, buckets and the token table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.arrow import write_table
from data_contracts.errors import InputError
from data_contracts.tables import TOKENS
from stages.model.batch import Row, TokenTable, collate, length_buckets
from tests.stages.model.conftest import rows_of


def test_rows_are_padded_on_the_right_and_padding_is_never_attended_or_supervised() -> None:
    batch = collate(rows_of(5, 2, 3))
    assert batch.shape == (3, 5)
    assert batch.tokens == 10
    assert batch.attention_BT.tolist()[1] == [True, True, False, False, False]
    assert batch.positions_BT.tolist()[0] == [0, 1, 2, 3, 4]
    assert batch.document_BT.tolist() == [[0] * 5, [1, 1, -1, -1, -1], [2, 2, 2, -1, -1]]
    assert not (batch.answer_BT & ~batch.attention_BT).any()
    assert (batch.input_ids_BT[~batch.attention_BT] == 0).all()


def test_the_first_token_of_a_document_is_never_an_answer() -> None:
    batch = collate([Row("a", np.array([7, 8, 9]), np.array([True, True, True]))])
    assert batch.answers.label_N.tolist() == [8, 9]
    assert batch.answers.source_N.tolist() == [0, 1]


@pytest.mark.shared
def test_t01_a_pad_id_that_is_the_end_id_keeps_the_real_end_supervised(shared: Path) -> None:
    from transformers import AutoTokenizer

    folder = next((shared / "cases/files").glob("T01*"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 257
    rows = []
    for line in (folder / "pool.jsonl").read_text().splitlines():
        ids = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=True, return_dict=False)
        start = len(ids) - 3 if not rows else len(ids) - 1
        rows.append(Row(str(len(rows)), np.array(ids), np.arange(len(ids)) >= start))
    assert len(rows[0].input_ids) == 10
    batch = collate(rows)
    labels = torch.where(batch.answer_BT, batch.input_ids_BT, -100)
    assert labels[0, :10].tolist() == [-100] * 7 + [111, 107, 257]
    for row, given_row in enumerate(rows):
        length = len(given_row.input_ids)
        assert not batch.attention_BT[row, length:].any()
        assert (labels[row, length:] == -100).all()
        assert (labels[row] == 257).sum() == 1


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), limit=st.integers(1, 200))
def test_buckets_hold_every_row_once_within_the_limit(lengths: list[int], limit: int) -> None:
    buckets = length_buckets(lengths, limit)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lengths)))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= limit for b in buckets)
    longest = [max(lengths[i] for i in b) for b in buckets]
    assert longest == sorted(longest, reverse=True)
    assert length_buckets(lengths, limit, longest_first=False) == buckets[::-1]


@pytest.fixture
def table(tmp_path: Path) -> TokenTable:
    rows = rows_of(*([3, 4, 5] * 800))
    columns = {
        "example_id": [row.example_id for row in rows],
        "source": ["a"] * len(rows),
        "input_ids": [row.input_ids.tolist() for row in rows],
        "answer_mask": [row.answer_mask.tolist() for row in rows],
        "n_tokens": [len(row.input_ids) for row in rows],
        "n_answer_tokens": [int(row.answer_mask.sum()) for row in rows],
        "truncated": [False] * len(rows),
    }
    write_table(tmp_path / "data.arrow", TOKENS.schema, columns)
    return TokenTable(tmp_path)


def test_a_row_is_read_from_any_record_batch_of_the_mapped_table(table: TokenTable) -> None:
    expected = rows_of(*([3, 4, 5] * 800))
    assert len(table) == 2400
    assert table.lengths.tolist() == [3, 4, 5] * 800
    for index in (0, 1023, 1024, 2047, 2048, 2399):
        row = table.row(index)
        assert row.example_id == expected[index].example_id
        assert row.input_ids.tolist() == expected[index].input_ids.tolist()
        assert row.answer_mask.tolist() == expected[index].answer_mask.tolist()
        assert table.index_of(row.example_id) == index


def test_an_example_without_tokens_is_named(table: TokenTable) -> None:
    with pytest.raises(InputError, match="zzz"):
        table.index_of("zzz")
    with pytest.raises(IndexError):
        table.row(2400)


def test_a_row_without_tokens_or_with_another_mask_length_is_refused() -> None:
    with pytest.raises(InputError):
        collate([Row("a", np.array([], dtype=int), np.array([], dtype=bool))])
    with pytest.raises(InputError, match="mask of 1"):
        collate([Row("a", np.array([1, 2]), np.array([True]))])
    with pytest.raises(InputError):
        collate([])
