"""How long a quoted run takes: FLOPs at the rate of this quote's own steps, and what stages take beside their steps.

A rate is timed on blocks of steps, evaluations included; its interval is that of the blocks, so that a busy machine
shows. What a stage takes beside its steps (loading, writing) is the mean of the segments made so far. Where nothing was
trained the plan's modelled speed stands in, which is told and taken to be off by up to `MODEL_OFF`. Measured, so all of
this lies beside the quote and not in its digest. Shapes: P steps, K blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from data_contracts.arrow import read_table
from data_contracts.quotes import Hours, Quote, Span
from data_contracts.records import Decision, Plan
from stages.governor.quoting import TAIL
from stages.stage import Inputs, Work

TIMING = "timing.arrow"
BLOCKS = 8
"""Of a segment's steps, as many as there are."""
MODEL_OFF = 10.0
"""Factor: the plan's model ranks ways of training and does not know how busy a machine is, or how small a model."""
KEEPING = Span(expected=1.15, low=1.0, high=1.35)
"""Seconds of a long segment for each of its timed ones: snapshots and best checkpoints are written as it goes on. Eight
development runs took 0.9 to 1.35 of what their quotes' steps foretold."""
BESIDE_OFF = 1.5
"""Factor on what stages take beside their steps."""
SHOWN_WAYS = 6


def hours_of(quote: Quote, plan: Plan, decision: Decision | None, inputs: Inputs, work: Work) -> Hours:
    """Return the hours of every offer, and of the best one by every way of training that fits."""
    found = [(curve.table(), curve.measured(TIMING)) for curve in inputs.all("curve")]
    timed = [(table, read_table(path)) for table, path in found if path.is_file()]
    rate = block_rates(timed)
    total, stages = work.spent().total, work.spent().by_stage()
    ran = [given.ref for name in ("plan", "decision", "weighing") if (given := inputs.maybe(name))]
    before = work.spent(*ran).total  # without probes that a run does not make
    if rate is None:
        modelled = 1.0 / (plan.tokens_per_second * plan.flops_per_token)
        rate = Span(expected=modelled, low=modelled / MODEL_OFF, high=modelled * MODEL_OFF)
        beside = 0.0
    else:
        steps = sum(float(np.sum(timing.column("seconds").to_numpy())) for _, timing in timed)
        whole = sum(stages[name].seconds for name in ("begin", "train") if name in stages)
        beside = max(0.0, whole - steps) / len(timed)
    numbers = decision.numbers if decision else {}
    rounds = int(numbers.get("rounds_left") or 1)
    calls = rounds + 2  # a segment a round, the evaluation of two models

    def seconds(flops: Span, speed: float = 1.0) -> Span:
        left = [max(0.0, value - before.flops) for value in (flops.expected, flops.low, flops.high)]
        kept = (KEEPING.expected, KEEPING.low, KEEPING.high)
        rates = [each * more / speed for each, more in zip((rate.expected, rate.low, rate.high), kept, strict=True)]
        beside_them = (calls * beside, calls * beside / BESIDE_OFF, calls * beside * BESIDE_OFF)
        expected, low, high = (before.seconds + a * b + c for a, b, c in zip(left, rates, beside_them, strict=True))
        return Span(expected=expected, low=low, high=high)

    best = quote.offer(quote.best)
    fits = [way for way in plan.considered if way["fits"]][:SHOWN_WAYS]
    return Hours(
        basis="timed" if timed else "modelled",
        seconds={offer.arm: seconds(offer.flops) for offer in quote.offers},
        ways={
            name_of(way): seconds(best.flops, float(way["tokens_per_second"]) / plan.tokens_per_second) for way in fits
        },
        seconds_a_flop=rate,
        watts=total.joules / total.seconds if total.joules > 0 and total.seconds > 0 else None,
    )


def name_of(way: dict[str, object]) -> str:
    """Return a considered way of training for people."""
    parts = [str(way["technique"]), str(way["precision"]), f"micro-batch {way['micro_batch']}", str(way["savings"])]
    return ", ".join(part for part in parts if part)


def block_rates(timed: Sequence[tuple[pa.Table, pa.Table]]) -> Span | None:
    """Return seconds a FLOP over all segments, and between the blocks of their steps; None where nothing was timed.

    Args:
        timed: of each segment its curve (FLOPs so far by step) and its timing (seconds of each step and evaluation).
    """
    seconds: list[float] = []
    flops: list[float] = []
    for curve, timing in timed:
        step_P, flops_P = (curve.column(name).to_numpy() for name in ("step", "flops"))
        made_P = np.diff(flops_P, prepend=0.0)
        at, took = timing.column("step").to_numpy(), timing.column("seconds").to_numpy()
        took_P = np.array([took[at == step].sum() for step in step_P])
        for block in np.array_split(np.arange(len(step_P)), min(BLOCKS, len(step_P))):
            if made_P[block].sum() > 0:
                seconds.append(float(took_P[block].sum()))
                flops.append(float(made_P[block].sum()))
    if not flops:
        return None
    rate_K = np.array(seconds) / np.array(flops)
    low, high = np.quantile(rate_K, [TAIL, 1 - TAIL])
    expected = sum(seconds) / sum(flops)
    return Span(expected=expected, low=min(expected, float(low)), high=max(expected, float(high)))
