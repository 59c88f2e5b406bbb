"""The engine of weighing: losses of each arm by document, its price, and the choice.

An arm's price is what its scoring cost, brought from the sample that the probe scored to the whole pool. Losses are
those that training's own evaluations noted: no model is read. Shapes: D validation documents.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.config import ArmConfig, AutoConfig
from data_contracts.cost import Cost
from data_contracts.errors import ArtifactError, InputError
from data_contracts.records import Decision, Plan, Summary, Table, WeighedArm, Weighing
from stages.governor.payback import Forecast, Probe, forecasts, pick, visited_share
from stages.stage import Inputs, Work
from stages.statistics.paired import clustered_se

CHOOSING = ("score", "select")


def weigh_arms(auto: AutoConfig, inputs: Inputs, work: Work) -> Summary:
    """Write `weighing`. Raises `ArtifactError` where the inputs are not one of each an arm."""
    arms, curves, selections = auto.arms, inputs.all("curve"), inputs.all("selection")
    losses = inputs.all("validation_losses")
    counts = {len(arms), len(curves), len(selections), len(losses)}
    if len(counts) > 1 or not arms:
        raise ArtifactError(
            "one curve, one table of validation losses and one selection an arm, in the order of `auto.arms`",
            f"{len(curves)}, {len(losses)} and {len(selections)} of {len(arms)} arm(s)",
            "pass the outputs of every arm's select and train",
        )
    decision, plan = inputs.one("decision").record(Decision), inputs.one("plan").record(Plan)
    target = plan.flops_per_token * int(inputs.one("target_tokens").table().column("n_tokens").to_numpy().sum())
    before = work.spent(inputs.one("decision").ref).total.flops
    start_D, tokens_D = best_evaluation(inputs.one("start").table())
    probes: list[Probe] = []
    tried: list[tuple[ArmConfig, int]] = []
    failed: list[str] = []
    for arm, curve, selection, evaluated in zip(arms, curves, selections, losses, strict=True):
        chosen = sum(work.spent(selection.ref).by_cause().get(cause, Cost()).flops for cause in CHOOSING)
        sums_D, read_D = best_evaluation(evaluated.table())
        if not np.array_equal(read_D, tokens_D):
            raise ArtifactError(
                "arms that were evaluated on the same documents as what they started from",
                f"the probe of {arm.name} was not",
                "train all of them with one `data.validation` and one `train.validation_rows`",
            )
        probe = Probe(arm.name, *_points(curve.table()), sums_D, _price(arm, chosen, target, auto))
        if not len(probe.loss_P) or not np.isfinite(probe.sums_D).all():
            failed.append(arm.name)
            continue
        probes.append(probe)
        tried.append((arm, chosen + int(curve.table().column("flops")[-1].as_py())))
    if not probes or probes[0].name != arms[0].name:
        raise InputError(
            f"a finite validation loss of the arm to beat, {arms[0].name}",
            "its probe's loss is not finite",
            "lower `train.learning_rate`",
        )
    spendable = _spendable(decision, plan, work.spent().total.flops - before)
    found = forecasts(tokens_D, probes, spendable, work.rng("weigh", "resamples"))
    best = pick(found, auto.confidence)
    loss = float(start_D.sum() / tokens_D.sum())
    weighed = tuple(
        WeighedArm(
            name=arm.name,
            fraction=visited_share(arm, max(1, spendable - probe.price), plan.pass_flops),
            price_flops=probe.price,
            spent_flops=paid,
            probe_flops=int(probe.flops_P[-1]),
            probe_loss=float(probe.sums_D.sum() / tokens_D.sum()),
            probe_se=_error(probe.sums_D, tokens_D),
            training_flops=cast.training_flops,
            expected_loss=cast.loss,
            low=cast.low,
            high=cast.high,
            gain=cast.gain,
            gain_low=cast.gain_low,
            gain_high=cast.gain_high,
            probability=cast.probability,
            reuses=cast.reuses,
        )
        for (arm, paid), probe, cast in zip(tried, probes, found, strict=True)
    )
    record = Weighing(
        chosen=best.name,
        reason=_reason(best, found, auto.confidence),
        start_loss=loss,
        spendable_flops=spendable,
        arms=weighed,
        failed=tuple(failed),
    )
    work.record("weighing", record)
    return _summary(record)


def best_evaluation(losses: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return (nats over its answer tokens, answer tokens) of each document, at the lowest evaluation of a segment.

    That is the one whose weights the segment's checkpoint holds, unless they have forgotten more than is allowed; the
    last one where none is finite.
    """
    steps, sums, tokens = (losses.column(name).to_numpy() for name in ("step", "loss_sum", "answer_tokens"))
    found = {int(step): steps == step for step in np.unique(steps)}
    mean = {step: float(sums[rows].sum()) for step, rows in found.items() if np.isfinite(sums[rows]).all()}
    step = min(mean, key=lambda step: mean[step]) if mean else int(steps.max())
    order = np.argsort(losses.column("document").to_numpy()[found[step]])
    return sums[found[step]][order], tokens[found[step]][order]


def _error(sums_D: np.ndarray, tokens_D: np.ndarray) -> float:
    """Return the standard error of the loss; of a single document no less than the loss itself."""
    loss = float(sums_D.sum() / tokens_D.sum())
    return min(loss, clustered_se(sums_D - loss * tokens_D, None, float(tokens_D.sum())))


def _points(curve: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return (flops_P, loss_P): the finite evaluations after the start."""
    seen = curve.filter(pc.is_valid(curve.column("validation_loss")))
    flops_P = seen.column("flops").to_numpy().astype(np.float64)
    loss_P = seen.column("validation_loss").to_numpy()
    kept_P = np.isfinite(loss_P) & (flops_P > 0)
    return flops_P[kept_P], loss_P[kept_P]


def _price(arm: ArmConfig, paid: int, target: int, auto: AutoConfig) -> int:
    """Return what choosing from the whole pool costs from here on: what the sample's rows cost, scaled up.

    The target's own pass (`target` FLOPs) is paid once whatever the pool. Who scored the whole pool pays no more.
    """
    if not arm.passes:
        return 0
    fixed = min(target, paid)
    return round(fixed + (paid - fixed) / auto.sample)


def _spendable(decision: Decision, plan: Plan, paid: int) -> int:
    """Return the FLOPs that choosing and training may still spend; without a limit, those of a pass over the pool."""
    limit = decision.numbers.get("spendable_flops")
    return plan.pass_flops if limit is None else max(0, int(limit) - paid)


def _reason(best: Forecast, found: tuple[Forecast, ...], confidence: float) -> str:
    first = found[0]
    if len(found) == 1:
        return f"no arm but {first.name} could be tried"
    if best is first:
        rivals = max(found[1:], key=lambda arm: arm.probability)
        return (
            f"no way of choosing is expected to beat {first.name} in {confidence:.0%} of resamples; "
            f"{rivals.name} does in {rivals.probability:.0%}"
        )
    return (
        f"{best.name} is expected to end {best.gain:.4f} nats below {first.name}, "
        f"with its price paid, in {best.probability:.0%} of resamples"
    )


def _summary(record: Weighing) -> Summary:
    columns = (
        "arm", "probe loss", "price (FLOPs)", "left to train with", "share of the pool", "expected loss",
        "80 % interval", "beats the first", "pays after",
    )  # fmt: skip
    rows = tuple(
        (
            arm.name,
            round(arm.probe_loss, 4),
            arm.price_flops,
            arm.training_flops,
            round(arm.fraction, 4),
            round(arm.expected_loss, 4),
            f"{arm.low:.4f} to {arm.high:.4f}",
            f"{arm.probability:.0%}" if number else "–",
            _pays_after(arm) if number else "–",
        )
        for number, arm in enumerate(record.arms)
    )
    facts: dict[str, str | int | float | bool | None] = {
        "chosen": record.chosen,
        "reason": record.reason,
        "loss before": round(record.start_loss, 4),
        "FLOPs to spend": record.spendable_flops,
        "FLOPs that trying took": sum(arm.spent_flops for arm in record.arms),
    }
    if record.failed:
        facts["not finite"] = ", ".join(record.failed)
    return Summary(
        title=f"weigh: {record.chosen}", facts=facts, tables=(Table(title="Arms", columns=columns, rows=rows),)
    )


def _pays_after(arm: WeighedArm) -> str:
    """Return after how many uses a choice has paid; one that costs nothing and ends above the first never does."""
    return "never" if arm.reuses is None or (not arm.price_flops and arm.gain <= 0) else f"{arm.reuses:.2g} uses"
