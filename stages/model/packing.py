"""Packing: several documents in one row, without any of them seeing another.

A packed row restarts positions at each document and attends inside it alone, so a document's loss is what it is when it
stands by itself. Which documents share a row depends on lengths only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor

from data_contracts.errors import InputError
from stages.model.batch import Row, TokenBatch, batch_of


def pack(rows: Sequence[Row], row_tokens: int) -> list[list[int]]:
    """Group row indices into rows of at most `row_tokens` tokens by best-fit decreasing.

    Each document, longest first, goes to the fullest row that still holds it (Johnson 1974: at most 11/9 of the
    optimum and a bit). Equal lengths keep their order. Raises `InputError` for a document longer than `row_tokens`.
    """
    order = sorted(range(len(rows)), key=lambda index: (-len(rows[index].input_ids), index))
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, pack), sorted
    for index in order:
        length = len(rows[index].input_ids)
        if length > row_tokens:
            raise InputError(
                f"a document of at most {row_tokens} tokens",
                f"{rows[index].example_id} has {length}",
                "plan for a longer row or truncate",
            )
        at = bisect_left(free, (length, -1))
        if at < len(free):
            left, number = free.pop(at)
            packs[number].append(index)
        else:
            left, number = row_tokens, len(packs)
            packs.append([index])
        insort(free, (left - length, number))
    return packs


def collate_packed(packs: Sequence[Sequence[Row]], pad_to: int | None = None) -> TokenBatch:
    """Put each list of documents in one row; positions restart and labels never cross a boundary.

    Raises `InputError` like `batch.collate`.
    """
    return batch_of(packs, pad_to=pad_to, packed=True)


def attention_mask_for(batch: TokenBatch) -> Tensor:
    """Return the block-diagonal causal mask, bool of shape (B, 1, T, T), True where attention is allowed.

    Padding sees padding, so that no row of the softmax is empty; nothing reads what it computes.
    """
    document_BT = batch.document_BT
    length = document_BT.shape[1]
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=document_BT.device).tril()
    return ((document_BT[:, :, None] == document_BT[:, None, :]) & causal_TT)[:, None]
