"""The ranks that train together, as the training loop sees them: sums, gathers, rank 0's word.

One rank needs no process group; several use torch.distributed (gloo on CPU, nccl on GPU), which whoever starts the
ranks has set up. Every collective leaves the same bytes on every rank, so that all decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, distributed

BUCKET_BYTES = 32 * 2**20
"""Tensors are summed in buckets of about this size: fewer, larger messages, and little memory."""


class Channel(Protocol):
    """How ranks speak to whoever started them."""

    def progress(self, done: int, total: int) -> None:
        """Say that `done` of `total` steps are made; only rank 0's word counts."""

    def report(self, metrics: Mapping[str, float]) -> None:
        """Publish metrics; every rank calls it, and it may wait for all of them."""


@dataclass(frozen=True)
class Group:
    """`rank` of `size`, computing on `device` ("cpu" or "cuda:0")."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([item.reshape(-1) for item in bucket])
            distributed.all_reduce(flat)
            start = 0
            for item in bucket:
                item.copy_(flat[start : start + item.numel()].view_as(item))
                start += item.numel()

    def gather(self, item: Tensor) -> list[Tensor]:
        """Return every rank's `item` (equal shapes) in rank order."""
        if self.size == 1:
            return [item]
        placed = item.to(self.device)
        parts = [torch.empty_like(placed) for _ in range(self.size)]
        distributed.all_gather(parts, placed)
        return [part.to(item.device) for part in parts]

    def agree(self, values: Sequence[float]) -> list[float]:
        """Return rank 0's `values` (float64) on every rank."""
        if self.size == 1:
            return list(values)
        word = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        distributed.broadcast(word, src=0)
        return [float(value) for value in word.tolist()]

    def wait(self) -> None:
        """Return once every rank has come here."""
        if self.size > 1:
            distributed.barrier()


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split into runs of one dtype of about `BUCKET_BYTES`."""
    buckets: list[list[Tensor]] = []
    size = 0
    for item in tensors:
        heavy = size + item.numel() * item.element_size() > BUCKET_BYTES
        if not buckets or heavy or buckets[-1][0].dtype != item.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(item)
        size += item.numel() * item.element_size()
    return buckets
