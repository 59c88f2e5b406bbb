"""Rows, batches and the mapped token table.

A batch is right-padded with id 0, positions start at 0 at each document's first token, and which document a token
belongs to is written beside it; so neither the tokenizer's padding side, nor a pad id that equals the end id, nor the
rows that share a batch can change a loss. Shapes: B rows, T padded length, D documents, N supervised tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.errors import InputError

PAD_ID = 0
"""Any id does: padding has attention 0, document -1 and is never supervised."""


@dataclass(frozen=True, eq=False)
class Row:
    """One document: its ids (int), which of them are supervised (bool, same length) and its weight in the loss."""

    example_id: str
    input_ids: np.ndarray
    answer_mask: np.ndarray
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class Answers:
    """The supervised tokens of a batch, N of them in row-major order, documents contiguous.

    `source_N` is the flat index (row * T + t - 1) of the position that predicts the token, `label_N` the token itself
    and `document_N` the document it belongs to. The first token of a document is never among them.
    """

    source_N: Tensor
    label_N: Tensor
    document_N: Tensor


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Token ids with their documents.

    Attributes:
        input_ids_BT: int64, right-padded with `PAD_ID`.
        answer_BT: bool, True where the token is supervised (predicted from the one before).
        attention_BT: bool, True on real tokens.
        positions_BT: int64, position within the document; 0 on padding.
        document_BT: int64, index into `example_ids`; -1 on padding.
        example_ids: one a document, in the order of D.
        weights_D: float32, multiplies each document's loss.
        packed: whether a row may hold several documents.
    """

    input_ids_BT: Tensor
    answer_BT: Tensor
    attention_BT: Tensor
    positions_BT: Tensor
    document_BT: Tensor
    example_ids: list[str]
    weights_D: Tensor
    packed: bool = False
    _answers: list[Answers] = field(default_factory=list, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        rows, length = self.input_ids_BT.shape
        return int(rows), int(length)

    @property
    def tokens(self) -> int:
        """Number of real tokens."""
        return int(self.attention_BT.sum())

    @property
    def answers(self) -> Answers:
        """The supervised tokens that have a predecessor in their own document; found once a batch."""
        if not self._answers:
            document = self.document_BT
            inside = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] >= 0)
            row_N, time_N = torch.nonzero(self.answer_BT[:, 1:] & inside, as_tuple=True)
            self._answers.append(
                Answers(
                    row_N * document.shape[1] + time_N,
                    self.input_ids_BT[row_N, time_N + 1],
                    document[row_N, time_N + 1],
                )
            )
        return self._answers[0]

    def weightless(self) -> TokenBatch:
        """Return the batch with documents that weigh nothing in a loss."""
        return replace(self, weights_D=torch.zeros_like(self.weights_D))

    def to(self, device: str | torch.device) -> TokenBatch:
        """Return the batch on `device`."""
        if self.input_ids_BT.device == torch.device(device):
            return self
        found = self.answers  # found where the batch was made: indexing by a mask would synchronise an accelerator
        return replace(
            self,
            input_ids_BT=self.input_ids_BT.to(device),
            answer_BT=self.answer_BT.to(device),
            attention_BT=self.attention_BT.to(device),
            positions_BT=self.positions_BT.to(device),
            document_BT=self.document_BT.to(device),
            weights_D=self.weights_D.to(device),
            _answers=[Answers(found.source_N.to(device), found.label_N.to(device), found.document_N.to(device))],
        )


def collate(rows: Sequence[Row], *, pad_to: int | None = None) -> TokenBatch:
    """Put one document in each row, padded on the right to the longest or to `pad_to` tokens.

    Raises `InputError` for an empty list, an empty row, a mask of another length or a row longer than `pad_to`.
    """
    return batch_of([[row] for row in rows], pad_to=pad_to, packed=False)


def batch_of(packs: Sequence[Sequence[Row]], *, pad_to: int | None, packed: bool) -> TokenBatch:
    """Put each list of documents in one row, one after the other; see `collate` and `packing.collate_packed`."""
    rows = [row for pack in packs for row in pack]
    _check(rows, packs)
    lengths = [sum(len(row.input_ids) for row in pack) for pack in packs]
    longest = max(lengths) if pad_to is None else pad_to
    if max(lengths) > longest:
        raise InputError(
            f"a row of at most {longest} tokens", f"one has {max(lengths)}", "plan for a longer row or truncate"
        )
    shape = (len(packs), longest)
    ids, positions = np.full(shape, PAD_ID, np.int64), np.zeros(shape, np.int64)
    answer, document = np.zeros(shape, bool), np.full(shape, -1, np.int64)
    number = 0
    for index, pack in enumerate(packs):
        start = 0
        for row in pack:
            end = start + len(row.input_ids)
            ids[index, start:end] = row.input_ids
            answer[index, start:end] = row.answer_mask
            positions[index, start:end] = np.arange(end - start)
            document[index, start:end] = number
            start, number = end, number + 1
    return TokenBatch(
        torch.from_numpy(ids),
        torch.from_numpy(answer),
        torch.from_numpy(document >= 0),
        torch.from_numpy(positions),
        torch.from_numpy(document),
        [row.example_id for row in rows],
        torch.tensor([row.weight for row in rows], dtype=torch.float32),
        packed,
    )


def _check(rows: Sequence[Row], packs: Sequence[Sequence[Row]]) -> None:
    if not rows or not all(packs):
        raise InputError("a batch of at least one document a row", "a batch or row without any", "pass rows")
    for row in rows:
        if len(row.input_ids) == 0 or len(row.input_ids) != len(row.answer_mask):
            raise InputError(
                "a row has at least one token and a mask of the same length",
                f"{row.example_id} has {len(row.input_ids)} tokens and a mask of {len(row.answer_mask)}",
                "tokenise it again",
            )


def length_buckets(lengths: Sequence[int], batch_tokens: int, *, longest_first: bool = True) -> list[list[int]]:
    """Group row indices so that each group's rows * longest length stays within `batch_tokens`.

    Equal lengths keep their order, so the grouping is a function of `lengths` alone. A row longer than `batch_tokens`
    stands alone. `longest_first` puts the dearest group first: what does not fit in memory then fails at once.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    buckets: list[list[int]] = []
    for index in order:
        if buckets and (len(buckets[-1]) + 1) * lengths[buckets[-1][0]] <= batch_tokens:
            buckets[-1].append(index)
        else:
            buckets.append([index])
    return buckets if longest_first else buckets[::-1]


class TokenTable:
    """A `tokens` table, mapped: columns stay on disk, a row is read when asked for.

    Args:
        table: the table, its file, or the folder that holds `data.arrow`.

    `lengths` and `answer_lengths` are int32 arrays in the table's order (sorted by example_id).
    """

    def __init__(self, table: pa.Table | Path) -> None:
        if not isinstance(table, pa.Table):
            table = read_table(table / TABLE_FILE if table.is_dir() else table)
        self._table = table
        self.lengths: np.ndarray = table.column("n_tokens").to_numpy()
        self.answer_lengths: np.ndarray = table.column("n_answer_tokens").to_numpy()
        self.ids: pa.ChunkedArray = table.column("example_id")
        self.sources: pa.ChunkedArray = table.column("source")
        self._starts = np.cumsum([0, *(chunk.num_rows for chunk in table.to_batches())])
        self._batches = table.to_batches()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int, weight: float = 1.0) -> Row:
        """Return row `index`. Raises IndexError past the end."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch, at = self._batches[chunk], index - int(self._starts[chunk])
        return Row(
            batch.column("example_id")[at].as_py(),
            _items(batch.column("input_ids"), at),
            _items(batch.column("answer_mask"), at),
            weight,
        )

    def index_of(self, example_id: str) -> int:
        """Return the row of `example_id` by binary search. Raises `InputError` where it is not in the table."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.ids[middle].as_py() < example_id:
                low = middle + 1
            else:
                high = middle
        if low == len(self) or self.ids[low].as_py() != example_id:
            raise InputError("every example asked for has tokens", f"{example_id} has none", "run ingest again")
        return low


def _items(column: Any, at: int) -> np.ndarray:
    """Return list number `at` of a list column as a numpy array."""
    values: np.ndarray = column[at].values.to_numpy(zero_copy_only=False)
    return values
