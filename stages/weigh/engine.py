"""The engine of weighing: losses of each arm by document, its price, and the choice.

An arm's price is what its scoring cost, brought from the sample that the probe scored to the whole pool. One model is
held at a time. Shapes: D validation documents.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from data_contracts.config import ArmConfig, AutoConfig
from data_contracts.cost import Cost
from data_contracts.errors import ArtifactError, InputError
from data_contracts.records import Decision, ModelPin, Plan, Summary, Table, WeighedArm, Weighing
from stages.governor.payback import Forecast, Probe, forecasts, pick, visited_share
from stages.meter.flops import FlopModel
from stages.meter.machine import device_kind
from stages.meter.memory import peak_bytes
from stages.model.batch import TokenTable, collate, length_buckets
from stages.model.checkpoint import load_merged
from stages.model.loss import document_losses
from stages.model.pin import read_pin
from stages.stage import Inputs, Work
from stages.statistics.paired import clustered_se

BATCH_TOKENS = 4096
CHOOSING = ("score", "select")


def weigh_arms(auto: AutoConfig, inputs: Inputs, work: Work) -> Summary:
    """Write `weighing`. Raises `ArtifactError` where the inputs are not one of each an arm."""
    arms, curves, selections = auto.arms, inputs.all("curve"), inputs.all("selection")
    checkpoints = inputs.all("checkpoint")
    counts = {len(arms), len(curves), len(selections), len(checkpoints)}
    if len(counts) > 1 or not arms:
        raise ArtifactError(
            "one curve, one checkpoint and one selection an arm, in the order of `auto.arms`",
            f"{len(curves)}, {len(checkpoints)} and {len(selections)} of {len(arms)} arm(s)",
            "pass the outputs of every arm's select and train",
        )
    decision, plan = inputs.one("decision").record(Decision), inputs.one("plan").record(Plan)
    target = plan.flops_per_token * int(inputs.one("target_tokens").table().column("n_tokens").to_numpy().sum())
    before = work.spent(inputs.one("decision").ref).total.flops
    bench = Bench(read_pin(inputs.one("base")), TokenTable(inputs.one("validation_tokens").table()))
    with work.progress("weigh", float(len(arms) + 1), "models") as bar:
        start_D = bench.sums(inputs.one("start").folder)
        bar.advance()
        probes: list[Probe] = []
        tried: list[tuple[ArmConfig, int]] = []
        failed: list[str] = []
        for arm, curve, selection, checkpoint in zip(arms, curves, selections, checkpoints, strict=True):
            chosen = sum(work.spent(selection.ref).by_cause().get(cause, Cost()).flops for cause in CHOOSING)
            price = _price(arm, chosen, target, auto)
            probe = Probe(arm.name, *_points(curve.table()), bench.sums(checkpoint.folder), price)
            bar.advance()
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
    work.charge("probe", Cost(flops=bench.flops, tokens=bench.tokens, seconds=bench.seconds, peak_bytes=peak_bytes()))
    spendable = _spendable(decision, plan, work.spent().total.flops - before + bench.flops)
    found = forecasts(bench.tokens_D, probes, spendable, work.rng("weigh", "resamples"))
    best = pick(found, auto.confidence)
    loss = float(start_D.sum() / bench.tokens_D.sum())
    weighed = tuple(
        WeighedArm(
            name=arm.name,
            fraction=visited_share(arm, max(1, spendable - probe.price), plan.pass_flops),
            price_flops=probe.price,
            spent_flops=paid,
            probe_flops=int(probe.flops_P[-1]),
            probe_loss=float(probe.sums_D.sum() / bench.tokens_D.sum()),
            probe_se=_error(probe.sums_D, bench.tokens_D),
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


class Bench:
    """The validation documents, and what models make of them; counts what that costs."""

    def __init__(self, pin: ModelPin, rows: TokenTable) -> None:
        if not len(rows):
            raise InputError("a validation split of at least one row", "it has none", "give `data.validation`")
        self._pin, self._rows = pin, rows
        self._buckets = length_buckets([int(length) for length in rows.lengths], BATCH_TOKENS)
        self.tokens_D = np.zeros(len(rows))
        self.flops = self.tokens = 0
        self.seconds = 0.0

    @torch.no_grad()
    def sums(self, checkpoint: Path) -> np.ndarray:
        """Return nats over the answer tokens of each document, float64, by the model of `checkpoint`."""
        began = time.perf_counter()
        model = load_merged(checkpoint, self._pin, dtype=torch.float32, device=device_kind())
        meter = FlopModel.trace(model, train=False)
        sums_D = np.zeros(len(self._rows))
        for bucket in self._buckets:
            batch = collate([self._rows.row(index) for index in bucket]).to(device_kind())
            loss_D, tokens_D = document_losses(model, batch)
            sums_D[bucket], self.tokens_D[bucket] = loss_D.double().cpu(), tokens_D.cpu()
            self.flops += meter.forward(*batch.shape, int(tokens_D.sum()))
            self.tokens += batch.tokens
        self.seconds += time.perf_counter() - began
        return sums_D


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
