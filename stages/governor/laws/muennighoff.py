"""Muennighoff's law: the loss of a model whose data, or parameters, are more than there is unique data for.

Repeated tokens are worth less than fresh ones: U unique tokens seen 1 + R times count as
D' = U + U R* (1 − exp(−R/R*)), almost all of them up to four passes, and never more than U (1 + R*). Excess parameters
decay likewise. Then L = E + A/N'^α + B/D'^β. It cannot rise: over-fitting is not in it. Source: Muennighoff et al. 2023
(arXiv 2305.16264), equations 5 to 7, with the constants of their published fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import Field

from stages.governor.law import Columns, LossModel

Number = TypeVar("Number", float, np.ndarray)

DATA_DECAY = 15.387756
"""R*_D: repetitions after which a repeated token's worth has fallen to 1/e."""
PARAMETER_DECAY = 5.309743
"""R*_N, the same for excess parameters."""


def effective(unique: Number, repetitions: Number, decay: float) -> Number:
    """Return what `unique` units seen 1 + `repetitions` times are worth, in units seen once.

    Args:
        unique: tokens (or parameters), above 0.
        repetitions: R, at least 0; 0 is seen once.
        decay: R*, above 0.
    """
    return unique + unique * decay * -np.expm1(-repetitions / decay)


class Muennighoff(LossModel):
    """L(parameters, tokens, unique) in nats a token; the defaults are the published fit."""

    log_a: float = Field(6.255414, description="Natural logarithm of A, the weight of the parameters' term.")
    log_b: float = Field(7.3049974, description="Natural logarithm of B, the weight of the data's term.")
    log_e: float = Field(0.6254804, description="Natural logarithm of E, the loss that nothing removes.")
    alpha: float = Field(0.3526596, gt=0)
    beta: float = Field(0.3526596, gt=0)
    data_decay: float = Field(DATA_DECAY, gt=0)
    parameter_decay: float = Field(PARAMETER_DECAY, gt=0)

    reads: ClassVar[tuple[str, ...]] = ("parameters", "tokens", "unique")
    told_by: ClassVar[Mapping[str, str]] = {
        "log_a": "parameters",
        "alpha": "parameters",
        "log_b": "tokens",
        "beta": "tokens",
    }
    height: ClassVar[str | None] = "log_a"
    starts: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "log_a": (3.0, 6.0, 9.0),
        "log_b": (3.0, 7.0, 10.0),
        "log_e": (-0.5, 0.6),
        "alpha": (0.25, 0.45),
        "beta": (0.25, 0.45),
        "data_decay": (4.0, 15.0),
    }

    @classmethod
    def by_parameters(cls, constants: Mapping[str, Any], runs: Columns) -> Any:
        """A/N^α: all parameters are of use where data is no limit."""
        return np.exp(constants["log_a"] - constants["alpha"] * np.log(runs["parameters"]))

    @classmethod
    def formula(cls, constants: Mapping[str, Any], runs: Columns) -> Any:
        """E + A/N'^α + B/D'^β, of whole tables; `loss` is the same for one run."""
        c, log_n = constants, np.log(runs["parameters"])
        unique_R = np.minimum(runs["unique"], runs["tokens"])
        log_g = (np.log(c["alpha"] / c["beta"]) + c["log_a"] - c["log_b"]) / (c["alpha"] + c["beta"])
        log_supported = log_g + (log_g + np.log(unique_R)) * c["beta"] / c["alpha"]
        log_used = np.where(np.real(log_supported) < log_n, log_supported, log_n)
        spare = np.expm1(log_n - log_used)
        data = effective(unique_R, runs["tokens"] / unique_R - 1.0, c["data_decay"])
        log_worth = log_used + np.log(effective(1.0, spare, c["parameter_decay"]))
        by_parameters = np.exp(c["log_a"] - c["alpha"] * log_worth)
        return np.exp(c["log_e"]) + by_parameters + np.exp(c["log_b"] - c["beta"] * np.log(data))

    def free(self, runs: Columns) -> tuple[str, ...]:
        """Return what the runs tell: R*_D only where data is repeated, R*_N where parameters are spare as well."""
        repeated = bool((runs["tokens"] > 1.5 * runs["unique"]).any())
        supported_R = np.array([self.supported_parameters(unique) for unique in runs["unique"]])
        spare = bool((runs["parameters"] > 1.5 * supported_R).any()) and np.ptp(runs["parameters"]) > 0
        untold = {*(() if repeated else ("data_decay",)), *(() if spare else ("parameter_decay",))}
        return tuple(name for name in super().free(runs) if name not in untold)

    def supported_parameters(self, unique: float) -> float:
        """Return the parameters that `unique` tokens can make use of: N optimal for D = U without repetition.

        With G = (αA/βB)^(1/(α+β)): N = G (G U)^(β/α).
        """
        scale = float(np.exp((np.log(self.alpha / self.beta) + self.log_a - self.log_b) / (self.alpha + self.beta)))
        return float(scale * (scale * unique) ** (self.beta / self.alpha))

    def effective_data(self, tokens: float, unique: float) -> float:
        """Return D' of `tokens` trained on, `unique` of them different (all of them, where there are fewer)."""
        unique = min(unique, tokens)
        return effective(unique, tokens / unique - 1.0, self.data_decay)

    def effective_parameters(self, parameters: float, unique: float) -> float:
        """Return N' of `parameters` trained on `unique` different tokens."""
        used = min(parameters, self.supported_parameters(unique))
        return effective(used, parameters / used - 1.0, self.parameter_decay)

    def loss(self, parameters: float, tokens: float, unique: float) -> float:
        """Return the loss of a model of `parameters` after `tokens`, `unique` of them different, in nats a token."""
        unique = min(unique, tokens)
        by_parameters = np.exp(self.log_a) / self.effective_parameters(parameters, unique) ** self.alpha
        by_data = np.exp(self.log_b) / self.effective_data(tokens, unique) ** self.beta
        return float(np.exp(self.log_e) + by_parameters + by_data)
