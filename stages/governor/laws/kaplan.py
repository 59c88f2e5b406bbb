"""Kaplan's law: L(N, D) = [(N_c/N)^(α_N/α_D) + D_c/D]^α_D, nats a token; and the laws of one quantity beside it.

N counts parameters without embeddings. There is no floor: the loss falls to 0, so it promises too much far out.
Source: Kaplan et al. 2020 (arXiv 2001.08361), equations 1.1 to 1.6, table 2 and table 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from stages.governor.law import Columns, LossModel


class Kaplan(LossModel):
    """L(parameters, tokens), for training until it no longer helps."""

    log_n: float = Field(math.log(6.4e13), description="Natural logarithm of N_c.")
    log_d: float = Field(math.log(1.8e13), description="Natural logarithm of D_c.")
    alpha_n: float = Field(0.076, gt=0)
    alpha_d: float = Field(0.103, gt=0)

    reads: ClassVar[tuple[str, ...]] = ("parameters", "tokens")
    without_embeddings: ClassVar[bool] = True
    told_by: ClassVar[Mapping[str, str]] = {
        "log_n": "parameters",
        "alpha_n": "parameters",
        "log_d": "tokens",
        "alpha_d": "tokens",
    }
    height: ClassVar[str | None] = "log_n"
    starts: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "log_n": (20.0, 26.0, 32.0, 40.0),
        "log_d": (20.0, 26.0, 32.0, 40.0),
        "alpha_n": (0.03, 0.08, 0.2, 0.4),
        "alpha_d": (0.03, 0.1, 0.2, 0.4),
    }

    @classmethod
    def by_parameters(cls, constants: Mapping[str, Any], runs: Columns) -> Any:
        """(N_c/N)^α_N."""
        return np.exp((constants["log_n"] - np.log(runs["parameters"])) * constants["alpha_n"])

    @classmethod
    def formula(cls, constants: Mapping[str, Any], runs: Columns) -> Any:
        """[(N_c/N)^(α_N/α_D) + D_c/D]^α_D."""
        c = constants
        by_parameters = np.exp((c["log_n"] - np.log(runs["parameters"])) * c["alpha_n"] / c["alpha_d"])
        by_tokens = np.exp(c["log_d"] - np.log(runs["tokens"]))
        return np.exp(c["alpha_d"] * np.log(by_parameters + by_tokens))


def loss_of_parameters(parameters: float) -> float:
    """Return (8.8e13/N)^0.076: enough data, trained to the end (equation 1.1)."""
    return float((8.8e13 / parameters) ** 0.076)


def loss_of_tokens(tokens: float) -> float:
    """Return (5.4e13/D)^0.095: a large model, stopped early (equation 1.2)."""
    return float((5.4e13 / tokens) ** 0.095)


def loss_of_compute(petaflop_days: float) -> float:
    """Return (3.1e8/C_min)^0.050: compute spent in the best way at small batches (equation 1.3)."""
    return float((3.1e8 / petaflop_days) ** 0.050)


def loss_of_steps(parameters: float, steps: float) -> float:
    """Return (6.5e13/N)^0.077 + (2.1e3/S_min)^0.76: steps far above the critical batch (equation 1.6, table 3)."""
    return float((6.5e13 / parameters) ** 0.077 + (2.1e3 / steps) ** 0.76)


def optimal_parameters(petaflop_days: float) -> float:
    """Return 1.3e9·C_min^0.73 parameters: what to spend compute on (equation 6.1, table 6)."""
    return float(1.3e9 * petaflop_days**0.73)


def critical_batch(loss: float) -> float:
    """Return 2e8/L^(1/0.21) tokens: from there on a larger batch saves few steps (equation 1.4)."""
    return float(2e8 / loss ** (1 / 0.21))
