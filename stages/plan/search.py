"""The search: every way of training that the configuration allows, its peak, and the first that fits.

Order of preference: technique as configured, then the larger micro-batch, then no recomputation of activations. A way
that needs more than the memory budget less its headroom is out. Recomputation is only priced where a technique does not
fit at its largest micro-batch without. Which step is priced, and how, is the estimator's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from data_contracts.config import PlanConfig
from data_contracts.errors import BudgetError
from stages.plan.estimate import Estimator, PhaseBytes
from stages.plan.trace import Shape


@dataclass(frozen=True)
class Way:
    """One way of training and what it is predicted to hold."""

    shape: Shape
    micro_batch: int
    accumulation: int
    phases: dict[str, PhaseBytes]
    allowed_bytes: int | None

    @property
    def peak_bytes(self) -> int:
        """The dearest phase."""
        return max(phase.total for phase in self.phases.values())

    @property
    def fits(self) -> bool:
        """Whether the peak stays within what is allowed."""
        return self.allowed_bytes is None or self.peak_bytes <= self.allowed_bytes

    @property
    def name(self) -> str:
        """Technique, precision, micro-batch and recomputation, for people."""
        recompute = ", recomputing activations" if self.shape.checkpoint_activations else ""
        return f"{type(self.shape.technique).name()}, {self.shape.precision}, micro-batch {self.micro_batch}{recompute}"


def search(
    estimator: Estimator, shapes: Sequence[Shape], plan: PlanConfig, *, window: int, workers: int, limit: int | None
) -> tuple[Way, list[Way]]:
    """Return the chosen way and every way that was priced, in order of preference.

    Args:
        estimator: prices a way.
        shapes: one a technique and precision, without recomputation, in order of preference.
        plan: micro-batches to try and the headroom.
        window: examples an optimizer step, over all workers.
        workers: Ray Train workers; 0 is this process.
        limit: memory of one worker, bytes; None is unlimited.

    Raises `BudgetError` naming the least memory that would do where nothing fits.
    """
    allowed = None if limit is None else int(limit * (1 - plan.headroom))
    ways: list[Way] = []
    for shape in shapes:
        plain = list(_ways(estimator, shape, plan, window, workers, allowed))
        ways += plain
        if not plain[0].fits:
            ways += _ways(estimator, replace(shape, checkpoint_activations=True), plan, window, workers, allowed)
    order = {id(shape.technique): number for number, shape in enumerate(shapes)}
    ways.sort(key=lambda w: (order[id(w.shape.technique)], -w.micro_batch, w.shape.checkpoint_activations))
    chosen = next((way for way in ways if way.fits), None)
    if chosen is None:
        nearest = min(ways, key=lambda way: way.peak_bytes)
        needed = math.ceil(nearest.peak_bytes / (1 - plan.headroom))
        raise BudgetError(
            f"one way of training fits `budget.peak_bytes` = {limit:,} less {plan.headroom:.0%} headroom",
            f"the least of {len(ways)} ways ({nearest.name}) needs {nearest.peak_bytes:,} bytes",
            f"set `budget.peak_bytes` to at least {needed:,}, shorten rows (`ingest.longest_tokens`), "
            "or take a smaller model",
        )
    return chosen, ways


def _ways(
    estimator: Estimator, shape: Shape, plan: PlanConfig, window: int, workers: int, allowed: int | None
) -> Iterator[Way]:
    for micro_batch in micro_batches(plan.micro_batches, window, workers):
        accumulation = math.ceil(window / (micro_batch * max(1, workers)))
        phases = estimator.phases(shape, micro_batch, accumulation)
        yield Way(shape, micro_batch, accumulation, phases, allowed)


def micro_batches(wanted: Sequence[int], window: int, workers: int) -> list[int]:
    """Return the micro-batches to try, largest first; at least the smallest of `wanted`.

    A window holds two of them or more, over all workers: the gradient noise scale is read from their difference.
    """
    share = max(1, window // max(2, workers))
    return sorted({size for size in wanted if size <= share} or {min(wanted)}, reverse=True)


def precisions(wanted: str, device: str) -> str:
    """Return "float32" or "bfloat16". "auto" is bfloat16 where the device multiplies it in hardware, else float32.

    bfloat16 means autocast: matmuls in bfloat16, weights, gradients and moments in float32.
    """
    if wanted != "auto":
        return wanted
    from stages.meter.machine import accelerators, cpu_has_fast_bfloat16

    if device == "cuda":
        return "bfloat16" if all(float(item["capability"]) >= 8.0 for item in accelerators()) else "float32"
    return "bfloat16" if cpu_has_fast_bfloat16() else "float32"
