"""FLOPs of numpy's matrix products, which no dispatcher shows: counted by their shapes where they are made.

`product` is `@` and adds 2·m·k·n to the tallies in force, for sparse rows two a pair of numbers that meet. Without a
tally it only multiplies. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Tally:
    """Operations counted so far."""

    flops: int = 0


_tallies: ContextVar[tuple[Tally, ...]] = ContextVar("tallies", default=())


@contextmanager
def tallied() -> Iterator[Tally]:
    """Count, inside the context, the products made by `product` and what `note` is told."""
    tally = Tally()
    before = _tallies.set((*_tallies.get(), tally))
    try:
        yield tally
    finally:
        _tallies.reset(before)


def note(flops: int) -> None:
    """Add the operations of what is no `product`."""
    for tally in _tallies.get():
        tally.flops += flops


def product(left: Any, right: Any) -> Any:
    """Return left @ right, arrays or scipy's sparse ones, and count it."""
    if _tallies.get():
        note(product_flops(left, right))
    return left @ right


def product_flops(left: Any, right: Any) -> int:
    """Return the operations of left @ right."""
    if hasattr(left, "nnz") and hasattr(right, "nnz"):
        met_k = np.diff(left.tocsc().indptr).astype(np.int64) @ np.diff(right.tocsr().indptr)
        return 2 * int(met_k)
    if hasattr(left, "nnz") or hasattr(right, "nnz"):
        sparse, dense = (left, right) if hasattr(left, "nnz") else (right, left)
        columns = dense.shape[1 if sparse is left else 0] if dense.ndim > 1 else 1
        return 2 * int(sparse.nnz) * int(columns)
    return 2 * math.prod(left.shape) * (right.shape[-1] if right.ndim > 1 else 1)
