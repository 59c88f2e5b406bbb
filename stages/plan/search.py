"""The search: every compatible way of training, its peak and its speed; what does not fit is out; the rest is ranked.

A way is a technique, a micro-batch and savings: moments in another form or in main memory, the output head in parts,
updates inside the backward pass, activations in main memory, everything spread over the workers, and which blocks are
recomputed. Techniques come in the configured order, a better one that fits before any of the next (the prior on quality
between techniques is the user's order). Within one, ways are ranked by modelled tokens a second times a prior on
quality: 1 where losses are what they are without the saving, `PRIORS` for moments in another form. Savings are priced
only where the fastest plain way of a technique does not fit. Which step is priced, and how, is the estimator's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from data_contracts.config import PlanConfig, Saving
from data_contracts.errors import DoesNotFitError
from stages.plan.estimate import PhaseBytes, Priced
from stages.plan.trace import Shape
from stages.technique.states import has_8bit
from stages.technique.step import States

LOSS_CHUNKS = 8
"""Parts of the output head's work; as torchtune's default."""
PRIORS: dict[States, float] = {"float32": 1.0, "8bit": 0.95, "4bit": 0.85, "mini": 0.95, "host": 1.0}
"""Worth of a token by the form of the moments. Dettmers et al. 2022 (arXiv 2110.02861, table 1) find no loss with 8
bits on ten tasks, Zhang et al. 2024 (arXiv 2406.16793) none with Adam-mini: 5 % is asked for what was not among them.
With 4 bits a small model here takes a sixth more steps to the same loss (`tests/stages/technique/test_savings.py`)."""
FORMS: dict[States, str] = {
    "8bit": "moments in 8 bits", "4bit": "moments in 4 bits", "mini": "one second moment a block",
    "host": "moments in main memory",
}  # fmt: skip
LEAST_SHARE = 0.05
"""Savings on moments and gradients are tried where moments are at least this share of the weights."""


class Estimates(Protocol):
    """What the search asks of an estimator; see `Estimator`."""

    host: str | None

    def price(self, shape: Shape, micro_batch: int, accumulation: int, recomputed: tuple[int, ...] = ()) -> Priced:
        """Return peak bytes and seconds of a step."""

    def recomputing(self, shape: Shape, micro_batch: int, accumulation: int, allowed: int) -> tuple[int, ...] | None:
        """Return the blocks whose recomputation fits in the least time; None where none fits."""

    def least(self, shape: Shape, micro_batch: int, accumulation: int) -> tuple[int, ...]:
        """Return the blocks whose recomputation gives the lowest peak."""


@dataclass(frozen=True)
class Way:
    """One way of training, what it is predicted to hold and how fast it is modelled to be."""

    shape: Shape
    micro_batch: int
    accumulation: int
    recomputed: tuple[int, ...]
    priced: Priced
    allowed_bytes: int | None
    order: int
    """Of its technique, as configured."""
    workers: int = 0

    @property
    def phases(self) -> dict[str, PhaseBytes]:
        """Bytes by phase."""
        return self.priced.phases

    @property
    def peak_bytes(self) -> int:
        """The dearest phase."""
        return self.priced.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak stays within what is allowed."""
        return self.allowed_bytes is None or self.peak_bytes <= self.allowed_bytes

    @property
    def tokens_per_second(self) -> float:
        """Modelled, for rows of the longest row's length, over all workers."""
        tokens = self.shape.row_tokens * self.micro_batch * self.accumulation
        return tokens * max(1, self.workers) / self.priced.seconds

    @property
    def worth(self) -> float:
        """Tokens a second times the prior on quality."""
        return self.tokens_per_second * PRIORS[self.shape.optimizer_states]

    @property
    def rank(self) -> tuple[int, float, int]:
        """Smaller is better: technique, then worth, then bytes."""
        return self.order, -self.worth, self.peak_bytes

    @property
    def savings(self) -> list[str]:
        """What it saves memory by, for people."""
        shape, found = self.shape, []
        if self.recomputed:
            found.append(f"{len(self.recomputed)} blocks recomputed")
        if shape.loss_chunks > 1:
            found.append(f"loss in {shape.loss_chunks} parts")
        if shape.update_in_backward:
            found.append("updates inside the backward pass")
        if shape.optimizer_states in FORMS:
            found.append(FORMS[shape.optimizer_states])
        if shape.offload_activations:
            found.append("activations in main memory")
        if shape.shards > 1:
            found.append(f"spread over {shape.shards} workers")
        return found

    @property
    def name(self) -> str:
        """Technique, precision, micro-batch and savings, for people."""
        parts = [type(self.shape.technique).name(), self.shape.precision, f"micro-batch {self.micro_batch}"]
        return ", ".join(parts + self.savings)


def search(
    estimator: Estimates,
    shapes: Sequence[Shape],
    plan: PlanConfig,
    *,
    window: int,
    workers: int,
    limit: int | None,
    reserve: Collection[int] = (),
    residual: int = 0,
) -> tuple[Way, list[Way]]:
    """Return the best way that fits and every way that was priced, best first.

    Args:
        estimator: prices a way.
        shapes: one a technique and precision, without savings, in order of preference.
        plan: micro-batches to try, savings that may be used, and the headroom.
        window: examples an optimizer step, over all workers.
        workers: Ray Train workers; 0 is this process.
        limit: memory of one worker, bytes; None is unlimited.
        reserve: places of shapes that are priced only where no way of those before them fits.
        residual: bytes that are held past a prediction.

    Raises `DoesNotFitError` with the least memory that would do where nothing fits: the lowest peak of all ways, over
    all choices of recomputed blocks.
    """
    allowed = None if limit is None else int(limit * (1 - plan.headroom)) - residual
    ways: list[Way] = []
    for order, shape in enumerate(shapes):
        if order in reserve and any(way.fits for way in ways):
            continue
        terms = _Terms(estimator, plan, window, workers, allowed, order)
        plain = list(terms.plain(shape))
        ways += plain
        if not min(plain, key=lambda way: way.rank).fits:
            ways += terms.saving(shape, plain[0])
    ways.sort(key=lambda way: way.rank)
    chosen = next((way for way in ways if way.fits), None)
    if chosen is None:
        assert limit is not None, "without a limit everything fits"
        raise _refusal(ways, plan, limit, residual)
    return chosen, ways


def front(ways: Sequence[Way]) -> list[Way]:
    """Return the ways that no other beats in both bytes and tokens a second, fewest bytes first."""
    kept: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.peak_bytes, -way.tokens_per_second)):
        if not kept or way.tokens_per_second > kept[-1].tokens_per_second:
            kept.append(way)
    return kept


@dataclass(frozen=True)
class _Terms:
    """What is asked of one technique."""

    estimator: Estimates
    plan: PlanConfig
    window: int
    workers: int
    allowed: int | None
    order: int

    def way(self, shape: Shape, micro_batch: int, recomputed: tuple[int, ...] = ()) -> Way:
        accumulation = math.ceil(self.window / (micro_batch * max(1, self.workers)))
        priced = self.estimator.price(shape, micro_batch, accumulation, recomputed)
        return Way(shape, micro_batch, accumulation, recomputed, priced, self.allowed, self.order, self.workers)

    def plain(self, shape: Shape) -> Iterator[Way]:
        for micro_batch in micro_batches(self.plan.micro_batches, self.window, self.workers):
            yield self.way(shape, micro_batch)

    def saving(self, shape: Shape, plain: Way) -> Iterator[Way]:
        for saved in self._shapes(shape, plain):
            sizes = micro_batches(self.plan.micro_batches, self.window, self.workers)
            for micro_batch in [self.window] if saved.update_in_backward else sizes:
                first = self.way(saved, micro_batch)
                if saved is not shape:
                    yield first
                if not first.fits and "recompute" in self._allowed(shape):
                    yield from self._recomputing(first)

    def _allowed(self, shape: Shape) -> list[Saving]:
        return [saving for saving in self.plan.savings if saving in shape.technique.savings]

    def _recomputing(self, way: Way) -> Iterator[Way]:
        """Yield the fastest choice of blocks that fits, or the smallest where none does; `way` recomputes none."""
        assert self.allowed is not None, "without a limit everything fits"
        asked = (way.shape, way.micro_batch, way.accumulation)
        blocks = self.estimator.recomputing(*asked, self.allowed)
        blocks = self.estimator.least(*asked) if blocks is None else blocks
        if blocks:
            yield self.way(way.shape, way.micro_batch, blocks)

    def _shapes(self, shape: Shape, plain: Way) -> Iterator[Shape]:
        """Yield the shapes of all compatible savings but recomputation, `shape` itself first."""
        savings, phase = self._allowed(shape), next(iter(plain.phases.values()))
        trains_much = phase.moments >= LEAST_SHARE * phase.weights
        chunks = (1, LOSS_CHUNKS) if "chunked_loss" in savings else (1,)
        inside = trains_much and "update_in_backward" in savings and self.workers <= 1
        apart = self.estimator.host is not None
        small = [form for form in FORMS if trains_much and f"states_{form}" in savings]
        held: list[States] = ["float32", *(form for form in small if form != "8bit" or has_8bit())]
        if apart and trains_much and "offload_states" in savings:
            held.append("host")
        offloaded = (False, True) if apart and "offload_activations" in savings else (False,)
        yield shape
        for states, parts, backward, away in itertools.product(held, chunks, (False, True)[: 1 + inside], offloaded):
            saved = replace(
                shape, optimizer_states=states, loss_chunks=parts, update_in_backward=backward,
                offload_activations=away, answers=math.ceil(shape.answers / parts) * parts,
            )  # fmt: skip
            if saved != shape:
                yield saved
        if self.workers > 1 and "shard" in savings:
            for parts in chunks:
                answers = math.ceil(shape.answers / parts) * parts
                yield replace(shape, loss_chunks=parts, answers=answers, shards=self.workers)


def _refusal(ways: Sequence[Way], plan: PlanConfig, limit: int, residual: int) -> DoesNotFitError:
    nearest = min(ways, key=lambda way: way.peak_bytes)
    needed = math.ceil((nearest.peak_bytes + residual) / (1 - plan.headroom))
    phase = max(nearest.phases, key=lambda name: nearest.phases[name].total)
    return DoesNotFitError(
        f"one way of training fits `budget.peak_bytes` = {limit:,} less {plan.headroom:.0%} headroom",
        f"the least of {len(ways)} ways ({nearest.name}) needs {nearest.peak_bytes:,} bytes, in its phase {phase}",
        f"set `budget.peak_bytes` to at least {needed:,}, shorten rows (`ingest.longest_tokens`), "
        "or take a smaller model",
        needed_bytes=needed,
        least={way.order: way.peak_bytes for way in sorted(ways, key=lambda way: -way.peak_bytes)},
    )


def micro_batches(wanted: Sequence[int], window: int, workers: int) -> list[int]:
    """Return the micro-batches to try, largest first; at least the smallest of `wanted`, cut to a worker's window.

    A window holds two of them or more, over all workers: the gradient noise scale is read from their difference.
    """
    share, whole = max(1, window // max(2, workers)), max(1, window // max(1, workers))
    return sorted({size for size in wanted if size <= share} or {min(*wanted, whole)}, reverse=True)


def precisions(wanted: str, device: str) -> list[str]:
    """Return the precisions to try, in order: "float32" or "bfloat16" as asked for, with "auto" the device's own, which
    is bfloat16 where it multiplies that in hardware, and with "any" the other one after it.

    bfloat16 means autocast: matmuls in bfloat16, weights that train, gradients and moments in float32, and weights that
    never train below adapters in bfloat16.
    """
    if wanted not in ("auto", "any"):
        return [wanted]
    from stages.meter.machine import accelerators, cpu_has_fast_bfloat16

    if device == "cuda":
        fast = all(float(item["capability"]) >= 8.0 for item in accelerators())
    else:
        fast = cpu_has_fast_bfloat16()
    both = ["bfloat16", "float32"] if fast else ["float32", "bfloat16"]
    return both if wanted == "any" else both[:1]
