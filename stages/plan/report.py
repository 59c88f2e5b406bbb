"""What is said about a plan: the reason for the choice, the alternatives, and the bytes of each phase."""

from __future__ import annotations

from collections.abc import Sequence

from data_contracts.cost import Budget
from data_contracts.records import ModelPin, Plan, Summary, Table
from stages.plan.search import Way, front

SHOWN = 24
"""Most ways in the summary's table; the record has all."""


def why(chosen: Way, ways: Sequence[Way]) -> str:
    """Return one sentence on the choice."""
    before = ways[: ways.index(chosen)]
    limit = "no memory limit is set" if chosen.allowed_bytes is None else f"{_gib(chosen.allowed_bytes)} are allowed"
    if not before:
        return f"{chosen.name} ranks first and needs {_gib(chosen.peak_bytes)}; {limit}."
    return (
        f"{chosen.name} needs {_gib(chosen.peak_bytes)} and ranks first of those that fit; {limit}, "
        f"and {before[0].name} would need {_gib(before[0].peak_bytes)}."
    )


def summary_of(
    plan: Plan,
    chosen: Way,
    ways: Sequence[Way],
    pin: ModelPin,
    *,
    pool_rows: int,
    noise: float | None,
    remaining: Budget,
    past: int | None,
) -> Summary:
    """Return the summary: facts, a table of the alternatives, the Pareto front, a table of phase bytes."""
    grown = (pin.grown_vocabulary - pin.vocabulary) * pin.hidden if pin.grown_vocabulary else 0
    facts: dict[str, str | int | float | bool | None] = {
        "technique": str(plan.technique["method"]),
        "precision": plan.precision,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "workers": plan.workers,
        "examples_per_step": plan.micro_batch * plan.accumulation * max(1, plan.workers),
        "savings": ", ".join(chosen.savings) or "none",
        "longest_row_tokens": plan.row_tokens,
        "trainable_parameters": plan.trainable,
        "base_parameters": pin.parameters + grown * (1 if pin.tied_embeddings else 2),
        "embedding_weights": (pin.grown_vocabulary or pin.vocabulary) * pin.hidden,
        "peak_bytes": plan.peak_bytes,
        "process_bytes": next(iter(chosen.phases.values())).process,
        "residual_bytes": plan.residual_bytes,
        "modelled_tokens_per_second": round(plan.tokens_per_second, 1),
        "flops_per_token": plan.flops_per_token,
        "pool_rows": pool_rows,
        "pass_flops": plan.pass_flops,
        "passes_that_remain": remaining.flops / plan.pass_flops if remaining.flops is not None else None,
        "gradient_noise_tokens": noise,
        "why": plan.why,
    }
    measured: dict[str, str | int | float | bool | None] = {} if past is None else {"most_bytes_past_prediction": past}
    return Summary(
        title="Plan", facts=facts, measured=measured, tables=(alternatives(plan), _front(ways), phases_of(chosen))
    )


def alternatives(plan: Plan) -> Table:
    """Return the ways that were priced, best first."""
    columns = ("technique", "precision", "micro_batch", "savings", "peak_bytes", "tokens_per_second", "reason")
    more = len(plan.considered) - SHOWN
    return Table(
        title="Ways of training considered, best first" + (f" (the first {SHOWN}, {more} more)" if more > 0 else ""),
        columns=columns,
        rows=tuple(tuple(_short(item[name]) for name in columns) for item in plan.considered[:SHOWN]),
    )


def _short(value: str | int | float | bool | None) -> str | int | float | bool | None:
    return round(value, 1) if isinstance(value, float) else value


def _front(ways: Sequence[Way]) -> Table:
    return Table(
        title="Pareto front: no other way priced has fewer bytes and more tokens a second",
        columns=("way", "peak_bytes", "tokens_per_second", "fits"),
        rows=tuple((way.name, way.peak_bytes, round(way.tokens_per_second, 1), way.fits) for way in front(ways)),
    )


def phases_of(chosen: Way) -> Table:
    """Return the bytes of each phase of the chosen way."""
    return Table(
        title="Bytes held at the dearest moment of each phase of a step",
        columns=("phase", "weights", "moments", "gradients", "activations and transients", "process", "total"),
        rows=tuple(
            (name, item.weights, item.moments, item.gradients, item.activations, item.process, item.total)
            for name, item in chosen.phases.items()
        ),
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
