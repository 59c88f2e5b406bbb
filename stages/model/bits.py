"""Whole numbers of n bits each, n from 1 to 8, held in n / 8 bytes a number, whatever n is.

n is a sum of the widths 8, 4, 2 and 1; each width is a run of bytes that hold 8 / width numbers, the first lowest. So
three bits are a run of two and a run of one, and unpacking takes a shift and a mask a width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

WIDTHS = (8, 4, 2, 1)


def packed_bytes(numbers: int, bits: int) -> int:
    """Return the bytes that so many numbers take: eight of them fill whole bytes."""
    return -(-numbers // 8) * bits


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Return uint8 bytes that hold uint8 `codes` of any shape, each below 2 to the power of `bits`."""
    flat = functional.pad(codes.flatten(), (0, -codes.numel() % 8))
    parts = []
    for low, width in _fields(bits):
        part = (flat >> low).bitwise_and_(2**width - 1).view(-1, 8 // width)
        parts.append(part.bitwise_left_shift_(_places(width, codes.device)).sum(1, dtype=torch.uint8))
    return torch.cat(parts)


def unpack_bits(held: Tensor, bits: int, numbers: int) -> Tensor:
    """Return the first `numbers` codes, uint8, of what `pack_bits` gave."""
    eights = held.numel() // bits
    found, start = None, 0
    for low, width in _fields(bits):
        run = held[start : start + eights * width]
        part = (run[:, None] >> _places(width, held.device)).bitwise_and_(2**width - 1).flatten()
        start += len(run)
        found = part if found is None else found.bitwise_or_(part.bitwise_left_shift_(low))
    assert found is not None, "at least one bit"
    return found[:numbers]


def _fields(bits: int) -> Iterator[tuple[int, int]]:
    """Yield (lowest bit, width) of each run."""
    low = 0
    for width in WIDTHS:
        if bits & width:
            yield low, width
            low += width


def _places(width: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device)
