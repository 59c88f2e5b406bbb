"""Validation loss of an answer token, with a standard error that knows tokens of one document belong together.

L = sum s_i / sum n_i over documents (s_i nats, n_i answer tokens) is a ratio estimator; its variance comes from the
residuals s_i - L n_i of whole documents (Cochran 1977, Sampling Techniques, section 2.11), so the error is clustered by
document. Counts its FLOPs. Which evaluation becomes the checkpoint is the loop's decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from data_contracts.arrow import read_table
from stages.meter.flops import FlopModel
from stages.model.batch import TokenTable, collate, length_buckets
from stages.model.loss import chunk_of, document_losses
from stages.model.shards import sharded
from stages.train.examples import predicted_tokens
from stages.workers.group import Group

if TYPE_CHECKING:
    from stages.train.retention import Retained


@dataclass(frozen=True)
class Loss:
    """Mean loss of an answer token in nats, its standard error (None for one document), and how much was measured; with
    what the same weights still know of the retention set, where one is watched."""

    mean: float
    se: float | None
    documents: int
    answer_tokens: int
    retained: Retained | None = None

    @property
    def finite(self) -> bool:
        """Whether the mean is a number one can compare."""
        return math.isfinite(self.mean)


def ratio_estimate(loss_sums: torch.Tensor, answer_tokens: torch.Tensor) -> Loss:
    """Return the loss over documents given their sums (nats) and answer tokens; both of shape (documents,)."""
    sums_D, counts_D = loss_sums.double(), answer_tokens.double()
    documents, tokens = len(sums_D), float(counts_D.sum())
    if tokens == 0:
        return Loss(math.nan, None, documents, 0)
    mean = float(sums_D.sum()) / tokens
    if documents < 2:
        return Loss(mean, None, documents, int(tokens))
    residual = (sums_D - mean * counts_D).square().sum()
    return Loss(mean, math.sqrt(documents / (documents - 1) * float(residual)) / tokens, documents, int(tokens))


class Validation:
    """The validation rows, cut into batches once.

    Args:
        tokens: a `tokens` table's file.
        rows: most rows used, the first by example_id: ids are hashes of content, so these are a random sample that
            stays the same as long as its rows do. None uses all.
        batch_tokens: padded tokens a forward pass.
        loss_chunks: in how many parts a batch goes through the output head.
    """

    def __init__(self, tokens: Path, rows: int | None, batch_tokens: int, loss_chunks: int = 1) -> None:
        self._chunks = loss_chunks
        table = read_table(tokens)
        self._table, answers = TokenTable(table), predicted_tokens(table)
        count = len(self._table) if rows is None else min(rows, len(self._table))
        lengths = [int(length) for length in self._table.lengths[:count]]
        self._buckets = length_buckets(lengths, batch_tokens)
        self._shapes = [(len(bucket), lengths[bucket[0]], int(answers[bucket].sum())) for bucket in self._buckets]
        self.documents, self.tokens, self.answers_D = count, sum(lengths), answers[:count]

    def flops(self, meter: FlopModel) -> int:
        """Return the forward FLOPs of one evaluation, padding included."""
        return sum(meter.forward(*shape) for shape in self._shapes)

    @torch.no_grad()
    def __call__(self, model: nn.Module, group: Group, precision: str) -> tuple[Loss, torch.Tensor]:
        """Evaluate `model` (left in evaluation mode); the ranks share the batches and return the same.

        Returns the loss, and of shape (2, documents) float64 each document's loss sum in nats and its answer tokens.
        """
        model.eval()
        found = torch.zeros(2, self.documents, dtype=torch.float64)
        kind = torch.device(group.device).type
        for first in range(0, len(self._buckets), group.size):
            mine = first + group.rank < len(self._buckets)
            if not mine and not sharded(model):
                continue
            bucket = self._buckets[first + group.rank if mine else 0]  # where weights are spread, all pass or none can
            batch = collate([self._table.row(index) for index in bucket]).to(group.device)
            with torch.autocast(kind, torch.bfloat16, enabled=precision == "bfloat16"):
                loss_D, tokens_D = document_losses(model, batch, chunk_tokens=chunk_of(batch, self._chunks))
            if not mine:
                continue
            found[0, bucket] = loss_D.double().cpu()
            found[1, bucket] = tokens_D.double().cpu()
        placed = found.to(group.device)
        group.sum_([placed])
        found = placed.cpu()
        return ratio_estimate(*found), found
