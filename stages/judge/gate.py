"""The family of gates, and the paired comparison that several of them make.

A gate fails closed: evidence that is missing, empty, not finite or too little never passes. A failure for want of items
says so in its numbers (`scarce`), so that the verdict can hold instead of reject. Nothing here reads a file or a clock.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from data_contracts.method import Method
from data_contracts.records import Finding
from stages.judge.evidence import Evidence, pair

Numbers = dict[str, float | int | str | bool | None]


class Gate(Method):
    """One question asked of the evidence."""

    family: ClassVar[str] = "gates"
    home: ClassVar[str] = "stages.judge.gates"

    def judge(self, evidence: Evidence) -> Finding:
        """Return whether the gate passes, why, and every number it was decided from."""
        raise TypeError(f"{type(self).__name__} defines no judge")

    def found(self, passed: bool, reason: str, numbers: Numbers | None = None) -> Finding:
        """Return this gate's finding; numbers that are not finite are left out as None."""
        clean = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in (numbers or {}).items()
        }
        return Finding(gate=self.name(), passed=passed, reason=reason, numbers=clean)


class PairedGate(Gate):
    """A gate that asks for a difference between two models whose interval excludes zero.

    Losses compare as Σ loss / Σ answer tokens over the items, scores as means; the interval is a paired BCa bootstrap
    over items, or over whole sources where there are enough (`statistics/paired.py`).
    """

    suite: str = Field("perplexity", description="Suite of the evaluation.")
    value: Literal["loss", "score"] = Field("loss", description="Lower loss is better; higher score is better.")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Of the two-sided interval of the difference.")
    least_items: int = Field(20, ge=2, description="Fewer items are too little evidence.")
    resamples: int = Field(9999, ge=199, description="Bootstrap resamples.")
    seed: int = Field(0, ge=0, description="Of the bootstrap.")

    def compare(self, evidence: Evidence, before: str, after: str = "candidate") -> Finding:
        """Return whether `after` is better than `before` beyond the interval."""
        from stages.statistics.paired import compare_ratios

        pairs = pair(evidence, self.suite, self.value, before, after, self.least_items)
        numbers: Numbers = {"suite": self.suite, "value": self.value, "items": len(pairs.before)}
        if pairs.problem:
            return self.found(False, pairs.problem, {**numbers, "scarce": pairs.scarce})
        result = compare_ratios(
            pairs.before.value_N,
            pairs.after.value_N,
            pairs.before.weight_N,
            pairs.after.weight_N,
            pairs.before.sources,
            confidence=self.confidence,
            resamples=self.resamples,
            seed=self.seed,
        )
        numbers |= {
            "before": result.before,
            "after": result.after,
            "difference": result.difference,
            "standard_error": result.se,
            "low": result.low,
            "high": result.high,
            "confidence": self.confidence,
            "clusters": result.clusters,
        }
        better = result.high < 0 if self.value == "loss" else result.low > 0
        worse = result.low > 0 if self.value == "loss" else result.high < 0
        seen = (
            f"{self.suite} {self.value} {result.before:.4g} → {result.after:.4g}, {self.confidence:.0%} interval of "
            f"the difference [{result.low:.3g}, {result.high:.3g}], {len(pairs.before)} items"
        )
        if better:
            return self.found(True, f"better than the {before}: {seen}", numbers)
        verb = "worse than" if worse else "not shown to be better than"
        return self.found(False, f"{verb} the {before}: {seen}", numbers)
