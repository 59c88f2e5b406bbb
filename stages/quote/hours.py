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
from data_contracts.quotes import Hours, Quote, Span, summed
from data_contracts.records import Decision, Plan
from stages.governor.quoting import TAIL
from stages.quote.joint import name_of
from stages.stage import Inputs, Work

TIMING = "timing.arrow"
BLOCKS = 8
"""Of a segment's steps, as many as there are."""
MODEL_OFF = 10.0
"""Factor: the plan's model ranks ways of training and does not know how busy a machine is, or how small a model."""
KEEPING = Span(expected=1.15, low=1.0, high=1.35)
"""Seconds of a long segment for each of its timed ones: snapshots and best checkpoints are written as it goes on. Eight
development runs took 0.9 to 1.35 of what their quotes' steps foretold."""
BESIDE_OFF = Span(expected=1.0, low=1 / 1.5, high=1.5)
"""Factor on what stages take beside their steps."""
MODELS_EVALUATED = 2
"""The base and the candidate; a champion is not foreseen."""
SHOWN_WAYS = 6


def hours_of(
    quote: Quote, plan: Plan, decision: Decision | None, evaluation: float, inputs: Inputs, work: Work
) -> Hours:
    """Return the hours of every offer, of the best one by every way of training that fits, and of all of `quote.joint`.

    `evaluation` are the FLOPs of the last evaluation. Stages: what was made, then choosing, training and evaluating.
    """
    found = [(curve.table(), curve.measured(TIMING)) for curve in inputs.all("curve")]
    timed = [(table, read_table(path)) for table, path in found if path.is_file()]
    rate = block_rates(timed)
    total, stages = work.spent().total, work.spent().by_stage()
    ran = [given.ref for name in ("plan", "decision", "weighing") if (given := inputs.maybe(name))]
    before = work.spent(*ran)  # without probes that a run does not make
    made, made_flops = {stage: cost.seconds for stage, cost in before.by_stage().items()}, before.total.flops
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

    def parts(flops: Span, price: float, speed: float = 1.0) -> dict[str, Span]:
        """Return seconds by stage of a run of so many FLOPs, `price` of them for choosing."""
        ends: list[dict[str, float]] = []
        for value, per, kept, off in zip(_ends(flops), _ends(rate), _ends(KEEPING), _ends(BESIDE_OFF), strict=True):
            left = max(0.0, value - made_flops)
            choosing = min(price, left)
            reading = min(evaluation, left - choosing)
            ends.append(
                {
                    "score": choosing * per * kept,
                    "train": (left - choosing - reading) * per * kept / speed + rounds * beside * off,
                    "evaluate": reading * per * kept + MODELS_EVALUATED * beside * off,
                }
            )
        expected, low, high = ends
        later = {stage: Span(expected=expected[stage], low=low[stage], high=high[stage]) for stage in expected}
        none = Span(expected=0.0, low=0.0, high=0.0)
        now = {stage: Span(expected=spent, low=spent, high=spent) for stage, spent in made.items()}
        return {stage: now.get(stage, none) + later.get(stage, none) for stage in sorted({*now, *later})}

    best = quote.offer(quote.best)
    fits = [way for way in plan.considered if way["fits"]][:SHOWN_WAYS]
    by_stage = {offer.arm: parts(offer.flops, offer.price_flops) for offer in quote.offers}
    return Hours(
        basis="timed" if timed else "modelled",
        seconds={arm: summed(by_stage[arm].values()) for arm in by_stage},
        stages=by_stage,
        ways={
            name_of(way): summed(
                parts(best.flops, best.price_flops, float(way["tokens_per_second"]) / plan.tokens_per_second).values()
            )
            for way in fits
        },
        joint=tuple(parts(row.flops, quote.offer(row.arm).price_flops, row.speed) for row in quote.joint),
        seconds_a_flop=rate,
        watts=total.joules / total.seconds if total.joules > 0 and total.seconds > 0 else None,
    )


def _ends(span: Span) -> tuple[float, float, float]:
    return span.expected, span.low, span.high


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
