"""Does one number of the candidate stay within a limit?

The number is a suite's mean score, its loss an answer token, or its perplexity, over the items that have one. NaN, a
missing suite and too few items fail.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from data_contracts.records import Finding
from stages.judge.evidence import Evidence
from stages.judge.gate import Gate, Numbers


class Threshold(Gate):
    """Pass where the candidate's number lies within [`min`, `max`]; give one of the two, or both."""

    suite: str = Field("perplexity", description="Suite of the evaluation.")
    value: Literal["score", "loss", "perplexity"] = Field("score", description="Mean score, nats a token, or its exp.")
    min: float | None = Field(None, description="Least value that passes.")
    max: float | None = Field(None, description="Largest value that passes.")
    least_items: int = Field(20, ge=1, description="Fewer items are too little evidence.")

    @model_validator(mode="after")
    def _limited(self) -> Threshold:
        if self.min is None and self.max is None:
            raise ValueError("give `min`, `max` or both")
        return self

    def judge(self, evidence: Evidence) -> Finding:
        """Compare the candidate's number with the limits."""
        outcomes = evidence.outcomes(self.suite, "candidate", "score" if self.value == "score" else "loss")
        numbers: Numbers = {"suite": self.suite, "items": outcomes.measured, "min": self.min, "max": self.max}
        if not outcomes.measured:
            return self.found(False, f"the suite {self.suite!r} holds no {self.value} of the candidate", numbers)
        if not outcomes.finite:
            return self.found(False, f"a {self.value} of the candidate in {self.suite!r} is not finite", numbers)
        if outcomes.measured < self.least_items:
            reason = f"{outcomes.measured} item(s) are too few: at least {self.least_items} are asked for"
            return self.found(False, reason, {**numbers, "scarce": True})
        kept = [(v, w) for v, w in zip(outcomes.value_N, outcomes.weight_N, strict=True) if math.isfinite(v) and w > 0]
        weight = sum(w for _, w in kept)
        if not weight:
            return self.found(False, f"the suite {self.suite!r} holds no answer token of the candidate", numbers)
        value = float(sum(v for v, _ in kept) / weight)
        if self.value == "perplexity":
            value = math.exp(value) if value < 700 else math.inf  # exp overflows past 709
        above = self.min is None or value >= self.min
        below = self.max is None or value <= self.max
        limits = " and ".join(
            text
            for text in (
                f"at least {self.min:g}" if self.min is not None else "",
                f"at most {self.max:g}" if self.max is not None else "",
            )
            if text
        )
        reason = f"{self.suite} {self.value} {value:.4g}, {limits} asked for"
        return self.found(above and below, reason, {**numbers, "value": value})
