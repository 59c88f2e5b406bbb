"""Directions as products of two thin matrices: what a wide layer's contraction costs falls from o·i to r (o + i).

Σ_t b_tᵀ V a_t with V ≈ L R takes b_tᵀL and R a_t, r numbers each. Truncated singular value decompositions are the best
approximations of a rank (Eckart & Young 1936); how far off an influence is by it depends on the gradients it meets, so
it is measured on some examples' gradients at every rank at once: the k-th term of a product is s_k u_kᵀ G v_k.
Which rank is good enough is the caller's decision. Shapes: J directions, i and o a layer's inputs and outputs, K ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stages.gradients.taps import owners
from stages.meter.linear_algebra import svd_flops

DENSE_SIDE = 1024
"""Of a matrix with a longer short side only the leading terms are computed, by random projection."""
POWER_STEPS, SPARE = 2, 10
"""Of the random projection (Halko, Martinsson & Tropp 2011, algorithm 4.4 and section 4.3)."""


@dataclass(frozen=True)
class Factors:
    """Some directions of one linear layer, each a product of thin matrices, side by side: R is the sum of their ranks.

    Attributes:
        left_oR, right_Ri: of direction j columns (rows) `bounds[j]` to `bounds[j + 1]`.
    """

    left_oR: Tensor
    right_Ri: Tensor
    bounds: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """R."""
        return self.bounds[-1]

    def flops(self, rows: int) -> int:
        """Return the operations of contracting `rows` pairs of input and output gradient."""
        return 2 * rows * self.ranks * (self.left_oR.shape[0] + self.right_Ri.shape[1])


@dataclass(frozen=True)
class Spectrum:
    """The leading terms of one direction of one layer, and how much of its norm lies beyond each.

    Attributes:
        left_oK: left singular vectors times singular values.
        right_Ki: right singular vectors.
        beyond_K: Frobenius norm of what is left out after k + 1 terms, over that of the whole.
    """

    left_oK: Tensor
    right_Ki: Tensor
    beyond_K: np.ndarray

    @classmethod
    def of(cls, direction_oi: Tensor, most: int, seed: int) -> Spectrum:
        """Decompose a direction into at most `most` terms, all of them exactly where its short side is short."""
        short = min(direction_oi.shape)
        most = min(most, short)
        if short <= DENSE_SIDE:
            left, value, right_h = torch.linalg.svd(direction_oi, full_matrices=False)
            right = right_h.mT
        else:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                width = min(short, most + SPARE)
                left, value, right = torch.svd_lowrank(direction_oi, q=width, niter=POWER_STEPS)
        whole = float(direction_oi.double().square().sum())
        kept_K = value[:most].double().square().cumsum(0).cpu().numpy()
        beyond_K = np.sqrt(np.clip(1 - kept_K / (whole or 1.0), 0, None))
        return cls((left * value)[:, :most].contiguous(), right.mT[:most].contiguous(), beyond_K)

    @staticmethod
    def flops(outputs: int, inputs: int, most: int) -> int:
        """Return the operations of `of`: of the whole decomposition, or of the products with the matrix, the orthogonal
        bases of what they give and the small decomposition."""
        long, short = max(outputs, inputs), min(outputs, inputs)
        if short <= DENSE_SIDE:
            return svd_flops(long, short)
        width = min(short, most + SPARE)
        products = 2 * (2 * POWER_STEPS + 2) * outputs * inputs * width
        bases = 4 * (POWER_STEPS + 1) * (outputs + inputs) * width**2
        return products + bases + svd_flops(long, width)

    def rank(self, share: float) -> int | None:
        """Return the least number of terms beyond which at most `share` of the norm lies; None where all have more."""
        enough = np.flatnonzero(self.beyond_K <= share)
        return int(enough[0]) + 1 if len(enough) else None

    def terms(self, gradient_oi: Tensor) -> np.ndarray:
        """Return the product of a gradient with the first 1, 2, … K terms, float64; 2 o i K operations."""
        each_K = torch.linalg.vecdot((gradient_oi @ self.right_Ki.mT).mT, self.left_oK.mT)
        return np.asarray(each_K.double().cumsum(0).cpu())


def factored(spectra: Sequence[Spectrum], ranks: Sequence[int]) -> Factors:
    """Return the directions of one layer cut at these ranks."""
    return Factors(
        torch.cat([one.left_oK[:, :rank] for one, rank in zip(spectra, ranks, strict=True)], dim=1),
        torch.cat([one.right_Ki[:rank] for one, rank in zip(spectra, ranks, strict=True)]),
        (0, *np.cumsum(ranks).tolist()),
    )


def contract(factors: Factors, given_Ni: Tensor, gradient_No: Tensor) -> Tensor:
    """Return b_tᵀ L R a_t of each row for each direction, (N, J), in at least float32."""
    dtype = gradient_No.dtype
    wide = torch.promote_types(dtype, torch.float32)
    left_NR = (gradient_No @ factors.left_oR.to(dtype)).to(wide)
    right_NR = (given_Ni.to(dtype) @ factors.right_Ri.mT.to(dtype)).to(wide)
    pieces = zip(factors.bounds, factors.bounds[1:], strict=False)
    return torch.stack([torch.linalg.vecdot(left_NR[:, a:z], right_NR[:, a:z]) for a, z in pieces], dim=1)


def wide_layers(model: nn.Module, directions: Mapping[str, Tensor], least_side: int) -> dict[str, bool]:
    """Return the weights that linear layers alone use and both sides of which are wide; whether inputs come first."""
    found: dict[str, bool] = {}
    other: set[str] = set()
    for module, own in owners(model, directions).items():
        kind = type(module).forward
        for attribute, name in own.items():
            if attribute == "weight" and kind in (nn.Linear.forward, Conv1D.forward):
                if min(directions[name].shape[1:]) >= least_side:
                    found[name] = kind is Conv1D.forward
            else:
                other.add(name)
    return {name: turned for name, turned in found.items() if name not in other}
