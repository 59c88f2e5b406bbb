"""The bytes-based law: the loss in bits a byte that compute reaches with a tokenizer of T bytes a token.

L* = L0·C^γ + F·ln²(C^δ·T/T0) + E where parameters and bytes are split in the best way; C ≈ 6·N·bytes/T. The best split
keeps bytes a parameter, not tokens a parameter, when the tokenizer changes. The best T falls with C as T0·C^−δ; the
printed exponent's sign is read so. Source: "Compute Optimal Tokenization" 2026 (arXiv 2605.01188): latent tokenizers,
and `SUBWORD` ones. Other languages have another best T, near 4.58 bytes in Arabic and 5.67 in Russian (`with_best`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from stages.governor.law import FLOPS_PER_PARAMETER_TOKEN, Columns, LossModel


class Compression(LossModel):
    """L*(flops, compression) in bits a byte; `compression` is T, bytes a token."""

    log_l: float = Field(math.log(3342.0), description="Natural logarithm of L0, the weight of compute's term.")
    gamma: float = Field(0.206, gt=0, description="−γ: how fast compute's term falls.")
    log_f: float = Field(math.log(0.032), description="Natural logarithm of F, the price of a wrong compression.")
    delta: float = Field(0.035, gt=0, description="How fast the best compression falls with compute.")
    log_t: float = Field(math.log(18.2), description="Natural logarithm of T0.")
    log_e: float = Field(math.log(0.70), description="Natural logarithm of E, bits a byte.")

    reads: ClassVar[tuple[str, ...]] = ("flops", "compression")
    splits: ClassVar[tuple[str, ...]] = ("parameters", "bytes", "compression")
    told_by: ClassVar[Mapping[str, str]] = {
        "log_l": "flops",
        "gamma": "flops",
        "delta": "flops",
        "log_f": "compression",
        "log_t": "compression",
    }
    starts: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "log_l": (3.0, 6.0, 9.0),
        "gamma": (0.1, 0.2, 0.3),
        "log_f": (-5.0, -3.5, -2.0),
        "delta": (0.02, 0.05),
        "log_t": (2.0, 3.0, 4.0),
        "log_e": (-1.5, -0.4, 0.3),
    }

    @classmethod
    def formula(cls, constants: Mapping[str, Any], runs: Columns) -> Any:
        """L0·C^−γ + F·ln²(C^δ·T/T0) + E."""
        c, log_c = constants, np.log(runs["flops"])
        off = c["delta"] * log_c + np.log(runs["compression"]) - c["log_t"]
        return np.exp(c["log_l"] - c["gamma"] * log_c) + np.exp(c["log_f"]) * off**2 + np.exp(c["log_e"])

    def best_compression(self, flops: float) -> float:
        """Return T0·C^−δ, bytes a token."""
        return math.exp(self.log_t - self.delta * math.log(flops))

    def with_best(self, compression: float, flops: float) -> Compression:
        """Return this law for text whose best compression at `flops` is `compression` bytes a token."""
        return self.model_copy(update={"log_t": math.log(compression) + self.delta * math.log(flops)})

    def optimal(self, flops: float, **given: float) -> tuple[float, ...]:
        """Return (parameters, bytes, bytes a token); `given` may fix `compression`, and `b0`, `alpha`, `beta` of the
        split (`optimal_split`)."""
        compression = given.pop("compression", self.best_compression(flops))
        return (*optimal_split(flops, compression, **given), compression)


def optimal_split(
    flops: float, compression: float, b0: float = 17.5, alpha: float = 0.465, beta: float = 0.471
) -> tuple[float, float]:
    """Return (parameters, bytes) that are best for `flops` at `compression` bytes a token.

    bytes = B0·C^α·T^β, parameters = C·T/(6·bytes). The defaults are those of latent tokenizers; `SUBWORD_SPLIT` has the
    others.
    """
    bytes_ = b0 * flops**alpha * compression**beta
    return flops * compression / (FLOPS_PER_PARAMETER_TOKEN * bytes_), bytes_


SUBWORD = Compression(log_l=math.log(1087.0), gamma=0.181)
"""Of subword tokenizers; F, δ, T0 and E are those of latent ones."""
SUBWORD_SPLIT = {"b0": 2.8, "alpha": 0.501, "beta": 0.446}
"""Of `optimal_split`, for subword tokenizers: 44 bytes a parameter at 1e21 FLOPs; the paper's text says about 60."""
