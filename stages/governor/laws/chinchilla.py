"""Chinchilla's law: L = E + A/N^α + B/D^β, nats a token, for data that is never repeated.

The defaults are the refit of Besiroglu et al. 2024 (arXiv 2404.10102), which corrects the constants printed by Hoffmann
et al. 2022 (arXiv 2203.15556: `HOFFMANN`, whose intervals the refit shows to be too narrow by far).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from stages.governor.law import FLOPS_PER_PARAMETER_TOKEN, Columns, LossModel


class Chinchilla(LossModel):
    """L(parameters, tokens)."""

    log_e: float = Field(math.log(1.8172), description="Natural logarithm of E, the loss that nothing removes.")
    log_a: float = Field(math.log(482.01), description="Natural logarithm of A, the weight of the parameters' term.")
    log_b: float = Field(math.log(2085.43), description="Natural logarithm of B, the weight of the data's term.")
    alpha: float = Field(0.3478, gt=0)
    beta: float = Field(0.3658, gt=0)

    reads: ClassVar[tuple[str, ...]] = ("parameters", "tokens")
    told_by: ClassVar[Mapping[str, str]] = {
        "log_a": "parameters",
        "alpha": "parameters",
        "log_b": "tokens",
        "beta": "tokens",
    }
    height: ClassVar[str | None] = "log_a"
    starts: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "log_e": (-1.0, 0.0, 0.7, 1.3),
        "log_a": (0.0, 4.0, 8.0, 12.0),
        "log_b": (0.0, 4.0, 8.0, 12.0),
        "alpha": (0.15, 0.35, 0.7),
        "beta": (0.15, 0.35, 0.7),
    }

    @classmethod
    def by_parameters(cls, constants: Mapping[str, Any], runs: Columns) -> Any:
        """A N^−α."""
        return np.exp(constants["log_a"] - constants["alpha"] * np.log(runs["parameters"]))

    @classmethod
    def formula(cls, constants: Mapping[str, Any], runs: Columns) -> Any:
        """E + A N^−α + B D^−β."""
        c = constants
        by_tokens = np.exp(c["log_b"] - c["beta"] * np.log(runs["tokens"]))
        return np.exp(c["log_e"]) + cls.by_parameters(c, runs) + by_tokens

    def optimal(self, flops: float, **given: float) -> tuple[float, ...]:
        """N = G (C/6)^(β/(α+β)), D = C/(6 N), with G = (αA/βB)^(1/(α+β)); `given` must be empty."""
        if given:
            raise TypeError(f"Chinchilla reads parameters and tokens, not {', '.join(given)}")
        log_g = (math.log(self.alpha / self.beta) + self.log_a - self.log_b) / (self.alpha + self.beta)
        product = flops / FLOPS_PER_PARAMETER_TOKEN
        parameters = math.exp(log_g) * product ** (self.beta / (self.alpha + self.beta))
        return parameters, product / parameters


HOFFMANN = Chinchilla(log_e=math.log(1.69), log_a=math.log(406.4), log_b=math.log(410.7), alpha=0.34, beta=0.28)
"""As printed in Hoffmann et al. 2022, approach 3."""
