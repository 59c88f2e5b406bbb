"""The learning rate: linear warm-up, stable, decay (WSD).

Warm-up counts steps of the whole run, so a short first segment hands the rest of it on; a segment that anneals decays
over its last steps, from the peak at the first of them towards zero, which it would reach one step after the end: no
step is spent at a rate of zero. Sources: Hu et al. 2024 (MiniCPM, arXiv 2404.06395), section 4; Hägele et al. 2024
(arXiv 2405.18392) for 1 - sqrt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Shape = Literal["linear", "cosine", "sqrt"]


def decay_factor(shape: Shape, share: float) -> float:
    """Return the factor on the peak after `share` in [0, 1] of the decay: 1 at 0 and 0 at 1 for every shape."""
    if shape == "linear":
        return 1.0 - share
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * share))
    return 1.0 - math.sqrt(share)


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step of one segment.

    Args:
        peak: learning rate of the stable phase.
        warmup_steps: of the run, from its step 0.
        shape: of the decay.
        decay_from: first decaying step of the segment (0-based); None where it does not anneal.
        decay_steps: how many steps the decay lasts.
    """

    peak: float
    warmup_steps: int
    shape: Shape
    decay_from: int | None = None
    decay_steps: int = 0

    def annealing(self, start: int, steps: int, share: float, before: int = 0) -> Schedule:
        """Return the schedule that decays over the last `share` of a run's steps, at the earliest from step `start`.

        Args:
            start, steps: of the segment, the run's last.
            share: of the steps of the run at the segment's end.
            before: steps of the run before the segment.
        """
        length = max(1, min(math.ceil(share * (before + steps)), steps - start))
        return Schedule(self.peak, self.warmup_steps, self.shape, steps - length, length)

    def decaying_now(self, start: int, steps: int, share: float) -> tuple[Schedule, int]:
        """Return the schedule that decays from step `start` on, and the segment's new number of steps.

        The decay lasts `share` of the planned `steps`, or what is left of them where that is less.
        """
        length = max(1, min(math.ceil(share * steps), steps - start))
        return Schedule(self.peak, self.warmup_steps, self.shape, start, length), start + length

    def at(self, step: int, run_step: int) -> tuple[float, str]:
        """Return (learning rate, phase) of a step.

        Args:
            step: 0-based in the segment.
            run_step: 0-based in the run.
        """
        warm = 1.0
        if run_step < self.warmup_steps:
            warm = (run_step + 1) / self.warmup_steps
        if self.decay_from is not None and step >= self.decay_from:
            share = min(1.0, (step - self.decay_from) / self.decay_steps)
            return self.peak * warm * decay_factor(self.shape, share), "decay"
        return self.peak * warm, "warmup" if warm < 1.0 else "stable"

    def state(self) -> dict[str, Any]:
        """Return plain data that `of` reads back."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Schedule:
        """Return the schedule that `state` describes."""
        return cls(**state)
