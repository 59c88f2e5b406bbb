"""Make the plan: check that the data fits the model, price the ways of training, choose, and say why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data_contracts.cost import Budget
from data_contracts.errors import BudgetError, ConfigError, DoesNotFitError
from data_contracts.method import resolve
from data_contracts.records import ModelPin, Plan, Summary
from stages.governor.window import window_for
from stages.meter.flops import FlopModel
from stages.meter.machine import available_bytes, device_kind
from stages.model.batch import TokenTable
from stages.model.checkpoint import read_trainer
from stages.model.load import empty_model, locate
from stages.model.pin import highest_token, read_pin
from stages.plan.estimate import Estimator
from stages.plan.page import show
from stages.plan.picking import Picking
from stages.plan.report import summary_of, why
from stages.plan.residual import learnt
from stages.plan.search import Way, front, precisions, search
from stages.plan.targets import check_targets
from stages.plan.trace import Shape, seeded
from stages.plan.vocabulary import check_vocabulary, places_of
from stages.stage import Inputs, Work
from stages.technique.base import Technique
from stages.technique.batch_selector import SAVINGS
from stages.technique.cost import micro_batch_flops

if TYPE_CHECKING:
    from stages.plan.stage import PlanSlice


GOES_ON = "full"
"""The technique that can go on from another's checkpoint."""


@dataclass(frozen=True)
class Rows:
    """What the plan needs to know of the rows: their lengths, pool first."""

    lengths: np.ndarray
    answers: np.ndarray
    pool: int

    @property
    def longest(self) -> int:
        """Tokens of the longest row of pool and target."""
        return int(self.lengths.max())


def make_plan(config: PlanSlice, inputs: Inputs, work: Work) -> Summary:
    """Write the record `plan` and return its summary.

    Raises `MethodError` for a technique or layer name that does not exist, `ModelError` for token ids past the
    embedding, `BudgetError` where no way of training fits the memory or a single step exceeds the FLOPs left.
    """
    pin = read_pin(inputs.one("base"))
    rows = _rows(inputs)
    _check_data(pin, inputs, rows, work)
    device = device_kind()
    curves = [artifact.table() for artifact in inputs.all("curve")]
    window, noise = window_for(config.plan.window, curves, float(rows.answers[: rows.pool].mean()))
    model = empty_model(pin)
    techniques = _techniques(config, inputs)
    for technique in techniques:
        check_targets(technique, model)
    answers = rows.longest - 1 if config.plan.packed else int(rows.answers.max())
    anew = config.plan.precision == "any" and inputs.maybe("checkpoint") is None
    shapes, reserve = list[Shape](), set[int]()
    for technique in techniques:
        first = len(shapes)
        for each in (technique, *filter(None, [technique.in_four_bits() if anew else None])):
            for precision in precisions(config.plan.precision, device):
                shapes.append(Shape(each, precision, rows.longest, max(1, answers), config.plan.packed))
        reserve |= set(range(first + 1, len(shapes)))
    limit = asked = config.budget.peak_bytes
    past = learnt(inputs.all("curve"), work.earlier(), device)
    if limit is None and past.below is not None:
        limit = math.floor((past.below - 1) / (1 - config.plan.headroom))  # what there is was not enough for that
    residual, below = 0 if limit is None else past.of(limit, config.plan.headroom), past.below
    estimator = Estimator(pin, config.train, device, host="cpu" if device == "cuda" else None)
    with seeded():
        how: dict[str, Any] = {"window": window, "workers": config.train.workers, "reserve": reserve}
        terms = config.plan
        if config.train.influence:  # is not read from parts of a model
            terms = terms.model_copy(update={"savings": tuple(item for item in terms.savings if item != "shard")})
        if config.train.batch_selector:
            terms = terms.model_copy(update={"savings": tuple(item for item in terms.savings if item in SAVINGS)})
        try:
            chosen, ways = search(estimator, shapes, terms, **how, limit=limit, residual=residual)
        except DoesNotFitError as error:
            if not residual and limit == asked:
                raise
            held = f"held {residual:,} bytes more than predicted" if residual else "ran out of memory"
            work.notice(f"earlier segments {held}; {error.found}: planned without")
            limit, residual, below = asked, 0, None
            chosen, ways = search(estimator, shapes, terms, **how, limit=limit)
        flops = estimator.flops(chosen.shape, chosen.recomputed)
        picking = Picking.of(estimator, chosen)
        trainable = chosen.shape.technique.trainable_count(model)
        scoring = {} if limit is None else estimator.scoring(chosen.shape, trainable)
    remaining = Budget(flops=config.budget.flops, tokens=config.budget.tokens).minus(work.spent().total)
    plan = _plan(config, chosen, ways, rows, flops, picking, trainable=trainable, scoring=scoring)
    plan = plan.model_copy(update={"residual_bytes": residual, "ran_out_bytes": below})
    _check_step(plan, chosen, rows, flops, remaining)
    if chosen.peak_bytes > available_bytes() and device == "cpu":
        work.notice(f"the plan needs {chosen.peak_bytes:,} bytes; this machine has {available_bytes():,} left now")
    if (examples := plan.micro_batch * plan.accumulation * max(1, plan.workers)) != window:
        work.notice(f"a step takes {examples} examples, {window} rounded up to micro-batches of {plan.micro_batch}")
    work.record("plan", plan)
    summary = summary_of(plan, chosen, ways, pin, pool_rows=rows.pool, noise=noise, remaining=remaining, past=past.past)
    show(plan, chosen, ways, inputs.all("curve"), summary, work)
    return summary


def _rows(inputs: Inputs) -> Rows:
    pool = TokenTable(inputs.one("pool_tokens").table())
    target = inputs.maybe("target_tokens")
    tables = [pool] if target is None else [pool, TokenTable(target.table())]
    if not len(pool):
        raise ConfigError("a pool with at least one usable row", "it has none", "see the quarantine of ingest")
    return Rows(
        np.concatenate([table.lengths for table in tables]),
        np.concatenate([table.answer_lengths for table in tables]),
        len(pool),
    )


def _check_data(pin: ModelPin, inputs: Inputs, rows: Rows, work: Work) -> None:
    tokens = [item for name in ("pool_tokens", "target_tokens") for item in inputs.all(name)]
    pool = inputs.maybe("pool")
    places = places_of(pool.batches()) if pool else {}
    notice = check_vocabulary(pin, [item.batches() for item in tokens], highest_token(locate(pin)), places)
    if notice:
        work.notice(notice)
    if rows.longest > pin.longest:
        work.notice(f"the longest row has {rows.longest} tokens, the model was made for {pin.longest}")


def _techniques(config: PlanSlice, inputs: Inputs) -> list[Technique]:
    """Return the techniques to choose from: of a checkpoint its own, and before it `full` where that is preferred."""
    named = [
        resolve(Technique, settings, f"plan.techniques[{number}]")
        for number, settings in enumerate(config.plan.techniques)
    ]
    checkpoint = inputs.maybe("checkpoint")
    if checkpoint is None:
        return named
    own = resolve(Technique, read_trainer(checkpoint.folder)["technique"], "the checkpoint's technique")
    preferred = named[: named.index(own)] if own in named else []
    return [*(technique for technique in preferred if type(technique).name() == GOES_ON), own]


def _plan(
    config: PlanSlice,
    chosen: Way,
    ways: list[Way],
    rows: Rows,
    flops: FlopModel,
    picking: Picking | None,
    *,
    trainable: int,
    scoring: dict[str, int],
) -> Plan:
    lengths, answers = rows.lengths[: rows.pool], rows.answers[: rows.pool]
    tokens = int(lengths.sum())
    technique, shape = chosen.shape.technique, chosen.shape
    chunks, inside = shape.loss_chunks, shape.update_in_backward
    train = sum(
        micro_batch_flops(flops, 1, int(n), int(a), loss_chunks=chunks, update_in_backward=inside)
        for n, a in zip(lengths, answers, strict=True)
    )
    batches = math.ceil(rows.pool / chosen.micro_batch)
    steps = math.ceil(batches / (chosen.accumulation * max(1, config.train.workers)))
    train += flops.beside(batches, steps)
    if picking is not None:
        train = picking.pass_flops(train, flops, rows.lengths, rows.answers, rows.pool, steps)
    forward = sum(flops.forward(1, int(n), int(a)) for n, a in zip(lengths, answers, strict=True))
    return Plan(
        technique={"method": type(technique).name(), **technique.model_dump(mode="json")},
        precision=chosen.shape.precision,
        micro_batch=chosen.micro_batch,
        accumulation=chosen.accumulation,
        packed=chosen.shape.packed,
        row_tokens=chosen.shape.row_tokens,
        recomputed_blocks=chosen.recomputed,
        optimizer_states=shape.optimizer_states,
        loss_chunks=chunks,
        update_in_backward=inside,
        window=config.plan.window,
        answer_tokens=float(answers.mean()),
        workers=config.train.workers,
        sharded=shape.shards > 1,
        offload_activations=shape.offload_activations,
        trainable=trainable,
        peak_bytes=chosen.peak_bytes,
        phases={name: phase.total for name, phase in chosen.phases.items()},
        limit_bytes=config.budget.peak_bytes,
        allowed_bytes=chosen.allowed_bytes,
        score_bytes=scoring,
        flops_per_token=math.ceil(train / tokens),
        flops_per_token_forward=math.ceil(forward / tokens),
        pass_flops=math.ceil(train),
        tokens_per_second=chosen.tokens_per_second,
        why=why(chosen, ways),
        considered=tuple(_considered(way, chosen, front(ways)) for way in ways),
    )


def _considered(way: Way, chosen: Way, best: list[Way]) -> dict[str, Any]:
    if way is chosen:
        reason = "chosen"
    elif not way.fits:
        reason = f"needs {way.peak_bytes:,} bytes, {way.allowed_bytes:,} are allowed"
    else:
        reason = "fits, but ranks lower"
    return {
        "technique": type(way.shape.technique).name(),
        "place": way.order,
        "examples": way.micro_batch * way.accumulation * max(1, way.workers),
        "precision": way.shape.precision,
        "micro_batch": way.micro_batch,
        "savings": ", ".join(way.savings),
        "recomputed_blocks": len(way.recomputed),
        "peak_bytes": way.peak_bytes,
        "tokens_per_second": way.tokens_per_second,
        "on_front": any(way is item for item in best),
        "fits": way.fits,
        "reason": reason,
    }


def _check_step(plan: Plan, chosen: Way, rows: Rows, flops: FlopModel, remaining: Budget) -> None:
    examples = min(plan.micro_batch * plan.accumulation * max(1, plan.workers), rows.pool)
    step = math.ceil(plan.flops_per_token * float(rows.lengths[: rows.pool].mean()) * examples)
    if remaining.flops is not None and step > remaining.flops:
        raise BudgetError(
            "one optimizer step fits the FLOPs that are left",
            f"a step of {examples} examples takes about {step:,}, {remaining.flops:,} are left",
            f"raise `budget.flops` by at least {step - remaining.flops:,} or lower `plan.window`",
        )
