"""Feature rows in 1, 4, 8 or 16 bits a number and one scale a row, made so that inner products survive.

Rows are turned by a fixed random rotation first, so that no coordinate is heavy: numbers of a row are then nearly
normal and the largest is a few standard deviations. 4, 8: the nearest of 15 or 255 equal steps within ± the largest.
1: the signs, scaled by ‖x‖² / ‖x‖₁, which makes the product with a vector that is not quantised unbiased (Gao & Long
2024, RaBitQ); its error is about 0.75 ‖x‖‖y‖ / √K. 16: half precision of x / largest. 32: the row as it is.
The rotation is exactly orthogonal, for any K: signs and a Hadamard transform over the first 2ᵖ ≥ K / 2 numbers, then
over the last. Imports no torch. Shapes: D rows, K numbers, U bytes of a row's code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

Bits = Literal[1, 4, 8, 16, 32]


@dataclass(frozen=True)
class Quantiser:
    """Encodes and decodes rows of `dimensions` numbers; a function of `dimensions` and `bits` alone."""

    dimensions: int
    bits: Bits

    @property
    def code_bytes(self) -> int:
        """U: bytes of one row's code; the scale takes four more."""
        return -(-self.dimensions * self.bits // 8)

    def encode(self, feature_DK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return code_DU (uint8) and scale_D (float32) of finite float32 rows; of a row of zeros both are zero."""
        feature_DK = np.asarray(feature_DK, dtype=np.float32)
        if self.bits == 32:
            return _bytes(np.ascontiguousarray(feature_DK, dtype="<f4")), np.ones(len(feature_DK), dtype=np.float32)
        turned = self._turn(feature_DK)
        size_DK = np.abs(turned)
        if self.bits == 1:
            one_D = size_DK.sum(axis=1, dtype=np.float64)
            square_D = np.square(turned, dtype=np.float64).sum(axis=1)
            scale_D = np.divide(square_D, one_D, out=np.zeros_like(one_D), where=one_D > 0)
            return np.packbits(turned >= 0, axis=1), scale_D.astype(np.float32)
        scale_D = size_DK.max(axis=1)
        unit_DK = turned / np.where(scale_D > 0, scale_D, 1)[:, None]
        if self.bits == 16:
            return _bytes(unit_DK.astype("<f2")), scale_D
        steps = 2 ** (self.bits - 1) - 1
        step_DK = np.rint(unit_DK * steps).astype(np.int8)
        if self.bits == 8:
            return step_DK.view(np.uint8), scale_D
        nibble_DK = (step_DK + 8).astype(np.uint8)
        if self.dimensions % 2:
            nibble_DK = np.concatenate([nibble_DK, np.zeros((len(nibble_DK), 1), np.uint8)], axis=1)
        return nibble_DK[:, ::2] << 4 | nibble_DK[:, 1::2], scale_D

    def decode(self, code_DU: np.ndarray, scale_D: np.ndarray) -> np.ndarray:
        """Return feature_DK (float32), in the coordinates that `encode` was given."""
        code_DU = np.ascontiguousarray(code_DU, dtype=np.uint8)
        if self.bits == 32:
            return code_DU.view("<f4").astype(np.float32)
        if self.bits == 1:
            unit_DK: np.ndarray = np.unpackbits(code_DU, axis=1, count=self.dimensions).astype(np.float32) * 2 - 1
        elif self.bits == 16:
            unit_DK = code_DU.view("<f2").astype(np.float32)
        elif self.bits == 8:
            unit_DK = code_DU.view(np.int8).astype(np.float32) / 127
        else:
            both = np.stack([code_DU >> 4, code_DU & 15], axis=2).reshape(len(code_DU), -1)
            unit_DK = (both[:, : self.dimensions].astype(np.float32) - 8) / 7
        return self._turn_back(unit_DK * np.asarray(scale_D, dtype=np.float32)[:, None])

    @cached_property
    def _rounds(self) -> list[tuple[slice, np.ndarray]]:
        """Return (which numbers, their signs) of each Hadamard transform."""
        size = 1 << (self.dimensions.bit_length() - 1)
        places = [slice(0, size)] if size == self.dimensions else [slice(0, size), slice(-size, None)] * 2
        random = np.random.default_rng(self.dimensions)
        return [(place, random.choice(np.array([-1, 1], dtype=np.float32), size)) for place in places]

    def _turn(self, feature_DK: np.ndarray) -> np.ndarray:
        turned = feature_DK.copy()
        for place, sign in self._rounds:
            turned[:, place] = _hadamard(turned[:, place] * sign)
        return turned

    def _turn_back(self, turned_DK: np.ndarray) -> np.ndarray:
        feature = turned_DK.copy()
        for place, sign in reversed(self._rounds):
            feature[:, place] = _hadamard(feature[:, place]) * sign
        return feature


def _hadamard(values_DM: np.ndarray) -> np.ndarray:
    """Return the orthonormal Hadamard transform of each row; M is a power of two. Its own inverse."""
    rows, size = values_DM.shape
    half = 1
    while half < size:
        pair = values_DM.reshape(rows, size // (2 * half), 2, half)
        values_DM = np.stack([pair[:, :, 0] + pair[:, :, 1], pair[:, :, 0] - pair[:, :, 1]], axis=2)
        half *= 2
    return values_DM.reshape(rows, size) * np.float32(size**-0.5)


def _bytes(values_DK: np.ndarray) -> np.ndarray:
    return values_DK.view(np.uint8)
