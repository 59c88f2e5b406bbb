"""The noisy quadratic system: the loss of N parameters after K steps at a batch of B, nats a token.

Gradient descent with noise on a quadratic whose n-th curvature is λ_n = Q n^−q, whose n-th distance costs ½ P n^−p and
whose gradient noise is R n^−r/B; N parameters learn the first N directions. With a_n = 1 − η λ_n:

    L = e + ½ P ζ(p, N+1) + Σ_{n≤N} [ ½ P n^−p a_n^{2K} + ½ λ_n R n^−r (η²/B) (1 − a_n^{2K})/(1 − a_n²) ]

Unlike laws of tokens it tells batch from steps. Constant learning rate; the published variant that adapts it to the
weights' norm is not in it. The sum is exact up to `EXACT` directions, then an integral over ln n.
Source: "Noisy Quadratic System" 2026 (arXiv 2605.09154) with the constants of its published example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from data_contracts.errors import InputError
from stages.governor.law import FLOPS_PER_PARAMETER_TOKEN, Columns, LossModel

GRID, ZOOMS = 33, 12
"""Places a side of the search for the best split, and how often it is narrowed to a quarter."""
LEARNING_RATE = 1.999
"""η; only ηQ counts, so it is fixed and Q is fitted."""
EXACT = 40
NODES_M, WEIGHTS_M = np.polynomial.legendre.leggauss(24)


class NoisyQuadratic(LossModel):
    """L(parameters, batch, steps)."""

    log_e: float = Field(math.log(0.35449737765209993), description="Natural logarithm of e, the loss that stays.")
    p: float = Field(1.1131253732848405, gt=1, description="Decay of the distances.")
    q: float = Field(0.584242820729791, gt=0, description="Decay of the curvatures.")
    r: float = Field(2.5829307382669966, gt=0, description="Decay of the noise.")
    distance: float = Field(3.3926855412266743, gt=0, description="P.")
    curvature: float = Field(0.8853327469240055, gt=0, description="Q; ηQ below 2, or training diverges.")
    noise: float = Field(8.410028810517371, gt=0, description="R.")

    reads: ClassVar[tuple[str, ...]] = ("parameters", "batch", "steps")
    splits: ClassVar[tuple[str, ...]] = ("parameters", "batch", "steps")
    told_by: ClassVar[Mapping[str, str]] = {"q": "steps", "curvature": "steps", "r": "batch", "noise": "batch"}
    starts: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "p": (1.1, 1.4),
        "q": (0.4, 0.8),
        "noise": (2.0, 10.0),
    }

    @classmethod
    def formula(cls, constants: Mapping[str, Any], runs: Columns) -> Any:
        """The sum above; NaN where p is not above 1."""
        c = {name: np.asarray(value)[..., None] for name, value in constants.items()}
        n_R = np.floor(runs["parameters"])
        log_n_RM, weight_RM = _directions(n_R)
        batch_R1, steps_R1 = runs["batch"][:, None], runs["steps"][:, None]
        shrink = LEARNING_RATE * c["curvature"] * np.exp(-c["q"] * log_n_RM)  # ηλ_n, 1 − a_n
        log_kept = steps_R1 * np.log((1 - shrink) ** 2)
        bias = np.exp(-c["p"] * log_n_RM + log_kept) * c["distance"]
        noise = c["noise"] * np.exp(-c["r"] * log_n_RM) * LEARNING_RATE / batch_R1
        variance = noise * -np.expm1(log_kept) / (2 - shrink)  # ηλ/(1 − a²) = 1/(2 − ηλ)
        learnt = 0.5 * ((bias + variance) * weight_RM).sum(-1)
        p = np.asarray(constants["p"])
        beyond = 0.5 * np.asarray(constants["distance"]) * _tail(p, n_R + 1)
        return np.exp(constants["log_e"]) + np.where(p.real > 1, beyond, np.nan) + learnt

    def optimal(self, flops: float, **given: float) -> tuple[float, ...]:
        """Return (parameters, batch, steps) with the lowest loss for `flops` = 6·parameters·batch·steps, the batch in
        tokens and at least 1, as are parameters and steps; `given` may fix `parameters`.

        By a grid over the logarithms of parameters and batch that is narrowed around its best place: parameters count
        whole, so that the loss has steps. Raises `InputError` for too few FLOPs for one step of one parameter.
        """
        product = flops / FLOPS_PER_PARAMETER_TOKEN
        fixed = given.pop("parameters", None)
        if given:
            raise TypeError(f"NoisyQuadratic reads parameters, batch and steps, not {', '.join(given)}")
        if product < (fixed or 1.0):
            raise InputError("FLOPs for one step at a batch of 1", f"{flops:.4g}", "give more FLOPs")
        whole = math.log(product)
        log_n = log_b = (0.0, whole)
        for _ in range(ZOOMS):
            n_G, b_G = np.meshgrid(np.linspace(*log_n, GRID), np.linspace(*log_b, GRID))
            size_G = np.floor(np.exp(n_G) + 1e-6) if fixed is None else np.full_like(n_G, fixed)
            steps_G = product / (size_G * np.exp(b_G))
            fits_G = steps_G >= 1 - 1e-12
            runs = {"parameters": size_G[fits_G], "batch": np.exp(b_G[fits_G]), "steps": steps_G[fits_G]}
            at = int(np.argmin(self.predict(runs)))
            best = tuple(float(runs[name][at]) for name in self.splits)
            log_n = _narrowed(log_n, float(n_G[fits_G][at]), whole)
            log_b = _narrowed(log_b, math.log(best[1]), whole)
        return best


def _narrowed(bounds: tuple[float, float], best: float, most: float) -> tuple[float, float]:
    """Return a quarter of the range around `best`, within 0 and `most`."""
    half = (bounds[1] - bounds[0]) / 8
    return max(0.0, best - half), min(most, best + half)


def _directions(n_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (ln n, weight), each (R, M): every direction to `EXACT`, then nodes of the integral from there to N.

    Σ_{n=a}^{b} f(n) ≈ ∫ f from a − ½ to b + ½, taken over ln n (Gauss–Legendre).
    """
    single_M = np.arange(1, EXACT + 1)
    alone_RM = (single_M <= n_R[:, None]).astype(np.float64)
    low, high_R = math.log(EXACT + 0.5), np.log(np.maximum(n_R, EXACT) + 0.5)
    half_R1 = (high_R - low)[:, None] / 2
    log_n_RM = low + half_R1 * (1 + NODES_M)
    return (
        np.concatenate([np.broadcast_to(np.log(single_M), alone_RM.shape), log_n_RM], axis=1),
        np.concatenate([alone_RM, half_R1 * WEIGHTS_M * np.exp(log_n_RM)], axis=1),
    )


def _tail(p: np.ndarray, start_R: np.ndarray) -> np.ndarray:
    """Return ζ(p, start) = Σ_{n≥start} n^−p, p may be complex: eight terms, then Euler–Maclaurin to the fifth order."""
    first = sum(np.exp(-p * np.log(start_R + k)) for k in range(8))
    x_R = start_R + 8
    power = np.exp(-p * np.log(x_R))
    rest = x_R / (p - 1) + 0.5 + p / (12 * x_R) - p * (p + 1) * (p + 2) / (720 * x_R**3)
    return np.asarray(first + power * rest)
