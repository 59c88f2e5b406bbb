"""Curves of earlier runs, as some policies compare a run with: the watched metric along FLOPs.

They are settings of a policy, so that a decision says what it was compared with. Which runs are comparable (same
target, same model) is the user's judgement.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from data_contracts.cost import Frozen


class RecordedCurve(Frozen):
    """One earlier run: FLOPs since its start and the metric's value there, in the metric's own sense."""

    flops: tuple[int, ...] = Field(min_length=1, description="Since the start of that run, rising.")
    values: tuple[float, ...] = Field(min_length=1, description="The watched metric at each.")

    @model_validator(mode="after")
    def _parallel(self) -> RecordedCurve:
        if len(self.flops) != len(self.values) or list(self.flops) != sorted(set(self.flops)):
            raise ValueError("flops must rise and be as many as values")
        return self

    def at(self, flops: int) -> float | None:
        """Return the first value at or beyond `flops`; None where the run ended before."""
        return next((value for spent, value in zip(self.flops, self.values, strict=True) if spent >= flops), None)

    def mean_until(self, flops: int) -> float | None:
        """Return the mean of the values up to `flops`; None where there is none or the run ended before `flops`."""
        seen = [value for spent, value in zip(self.flops, self.values, strict=True) if spent <= flops]
        return sum(seen) / len(seen) if seen and self.flops[-1] >= flops else None
