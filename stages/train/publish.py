"""From a finished segment's folder to artifacts: curve, example losses, timing, checkpoint, charges, summary."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.arrow import read_table, write_table
from data_contracts.cost import Cost
from data_contracts.errors import ModelError
from data_contracts.records import MemoryUse, Summary, Table
from stages.stage import Work
from stages.train.best import Best
from stages.train.guard import handed_on
from stages.train.job import Job
from stages.train.loop import RESULT, ROWS
from stages.train.order import visits_of
from stages.train.rows import CHOICES, TIMING, read_chunks
from stages.workers.train import run_workers

ENTRY = "stages.train.loop:run_segment"
TRAINER = "trainer.json"
Z95 = 1.959963984540054
"""97.5th percentile of the normal distribution."""


def train_segment(job: Job, work: Work, *, device: str, title: str) -> Summary:
    """Run the segment of `job` (or finish it, or take its result as it lies) and write the stage's outputs.

    Raises `ModelError` where no evaluation was finite: then nothing is written.
    """
    result = _finished(job)
    if result is None:
        repeats = read_table(Path(job.places.selection)).column("repeats").to_numpy()
        with work.progress(title, visits_of(repeats, job.plan, job.train, job.order_seed).steps, "step") as bar:
            made = 0

            def progress(done: int, total: int) -> None:
                nonlocal made
                bar.advance(max(0, done - made))
                made = done

            run_workers(
                ENTRY,
                job.model_dump(mode="json"),
                workers=job.plan.workers,
                device=device,
                folder=job.home,
                progress=progress,
            )
        result = _finished(job)
        assert result is not None, "the loop returns only after its result is written"
    at = result["position"]
    if at["best"] is None:
        raise ModelError(
            "at least one evaluation of a segment has a finite validation loss",
            f"none of the {at['evaluated']} had; {len(at['skipped'])} of {at['step']} steps were not finite either",
            "lower `train.learning_rate`, and look for broken rows in the selection; nothing was committed",
        )
    retains = job.places.retention is not None
    more = (
        ("retention_losses", retains),
        ("example_influence", job.train.influence),
        ("example_choices", job.train.batch_selector),
    )
    rows = dict.fromkeys(("curve", "validation_losses", "example_losses", *(name for name, asked in more if asked)), 0)
    for name in rows:
        with work.writer(name, extra=retains and name == "curve") as writer:
            for chunk in read_chunks(job.home / ROWS, result["chunks"], name):
                writer.extend(chunk)
                rows[name] += chunk.num_rows
    timing = pa.concat_tables(list(read_chunks(job.home / ROWS, result["chunks"], "timing")))
    write_table(work.measured("curve", "timing.arrow"), TIMING, timing)
    chosen = list(read_chunks(job.home / ROWS, result["chunks"], "choices"))
    write_table(work.measured("curve", "choices.arrow"), CHOICES, pa.concat_tables([CHOICES.empty_table(), *chosen]))
    use = _memory_use(job, at, timing, device)
    work.measured("curve", "memory.json").write_text(use.model_dump_json(), encoding="utf-8")
    kept, ended = Best(job.home, job.pin), {"run_step": result["run_step"], "guard": handed_on(at["guard"])}
    _put_checkpoint(kept.folder(at["best"]["step"]), work.path("checkpoint"), ended)
    if at["end"] is not None:
        _put_checkpoint(kept.folder(at["end"]["step"]), work.path("end"), ended)
    costs = _costs(job, at, timing)
    for cause, cost in costs.items():
        work.charge("probe" if job.cause == "probe" else cause, cost)  # of a probe all is what trying costs
    if at["halved"]:
        work.notice(
            f"memory ran out at step(s) {_first(at['halved'])}: micro-batches hold {at['micro_batch']} rows since, not "
            f"{job.plan.micro_batch}; steps hold as many examples as planned"
        )
    if at["skipped"]:
        work.notice(f"{len(at['skipped'])} step(s) were not finite and were not applied: {_first(at['skipped'])}")
    if at["returned"] or at["withheld"] or at["slowest"] < 1:
        work.notice(f"the guard acted: it {guard_said(at)}; see the curve's column `guard_action`" + remedy(at))
    if at["best"].get("forgot"):
        work.notice(
            f"every evaluation has forgotten more than the {job.most_forgotten:g} nats allowed: the checkpoint is that "
            f"of step {at['best']['step']}, which has forgotten least, and no run keeps it"
        )
    return _summary(job, result, costs, title, rows)


def guard_said(at: Mapping[str, Any]) -> str:
    """Return in words what the guard did in a segment, from its position."""
    said = []
    if at["withheld"]:
        said.append(f"did not apply step(s) {_first(at['withheld'])}")
    if at["slowest"] < 1:
        said.append(f"had the learning rate down to {at['slowest']:.3g} of what was set")
    if at["guard"].get("floored"):
        said.append("found even the least factor on it too much, so that a decay begins as soon as one is due")
    said += [f"went back from step {step} to the state of step {back}" for step, back in at["returned"][:3]]
    if len(at["returned"]) > 3:
        said.append(f"and so {len(at['returned']) - 3} more time(s)")
    return ", ".join(said) or "did nothing"


def remedy(at: Mapping[str, Any]) -> str:
    """Return what to do where the guard found the rate too large for good."""
    ceiling = at["guard"]["ceiling"]
    return f"; `train.learning_rate` is too large: {ceiling:.2g} of it was borne" if ceiling < 1 else ""


def _memory_use(job: Job, at: dict[str, Any], timing: pa.Table, device: str) -> MemoryUse:
    """Return what the segment's steps held; the next plan reads it (`stages.plan.residual`)."""
    what = np.array(timing.column("what").to_pylist())
    steps = timing.column("peak_bytes").to_numpy()[what == "step"]
    plan = job.plan
    return MemoryUse(
        device=device,
        predicted_bytes=plan.peak_bytes,
        allowed_bytes=None if plan.allowed_bytes is None else plan.allowed_bytes + plan.residual_bytes,
        measured_bytes=int(steps.max(initial=0)),
        ran_out=bool(at["halved"]),
    )


def _finished(job: Job) -> dict[str, Any] | None:
    try:
        result = json.loads((job.home / RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return result if result["work"] == job.digest else None


def _put_checkpoint(best: Path, output: Path, ended: dict[str, Any]) -> None:
    """Link (or copy) the best checkpoint's files, and say in `trainer.json` where the segment ended.

    The next segment counts its steps from there, so that a run's steps never repeat, and begins at a rate that the
    guard left.
    """
    for path in sorted(best.iterdir()):
        if path.name != TRAINER:
            try:
                os.link(path, output / path.name)
            except OSError:  # another file system
                shutil.copyfile(path, output / path.name)
    trainer = json.loads((best / TRAINER).read_text(encoding="utf-8")) | ended
    (output / TRAINER).write_text(json.dumps(trainer, sort_keys=True, indent=2) + "\n", encoding="utf-8")


def _costs(job: Job, at: dict[str, Any], timing: pa.Table) -> dict[str, Cost]:
    what, seconds = np.array(timing.column("what").to_pylist()), timing.column("seconds").to_numpy()
    peak = int(timing.column("peak_bytes").to_numpy().max(initial=0))
    costs = {
        job.cause: Cost(
            flops=at["flops"], tokens=at["tokens"], seconds=float(seconds[what == "step"].sum()), peak_bytes=peak
        ),
        "eval": Cost(
            flops=at["eval_flops"],
            tokens=at["eval_tokens"],
            seconds=float(seconds[what == "evaluation"].sum()),
            peak_bytes=peak,
        ),
    }
    if job.train.batch_selector:
        costs["select"] = Cost(
            flops=at["select_flops"],
            tokens=at["select_tokens"],
            seconds=float(seconds[what == "choice"].sum()),
            peak_bytes=peak,
        )
    if job.places.target:
        costs["score"] = Cost(
            flops=at["score_flops"],
            tokens=at["score_tokens"],
            seconds=float(seconds[what == "direction"].sum()),
            peak_bytes=peak,
        )
    return costs


def _summary(
    job: Job, result: dict[str, Any], costs: dict[str, Cost], title: str, written: Mapping[str, int]
) -> Summary:
    at, spent = result["position"], costs[job.cause]
    rows = [_loss_row("before", at["before"]), _loss_row("after", at["best"])]
    retention = {} if job.places.retention is None else {"retention_after": at["best"]["retention_loss"]}
    if retention and at["before"] is not None:
        retention["retention_before"] = at["before"].get("retention_loss")
    return Summary(
        title=title,
        facts={
            "technique": result["technique"]["method"],
            "steps": at["step"],
            "rows": result["rows"],
            "tokens": at["tokens"],
            "loss_before": rows[0][1],
            "loss_after": rows[1][1],
            **retention,
            "checkpoint_step": at["best"]["step"],
            "evaluations": at["evaluated"],
            "steps_not_applied": len(at["skipped"]) + len(at["withheld"]),
            **({} if job.train.guard is None else {"guard": guard_said(at)}),
            **({"micro_batch_halved_before_steps": _first(at["halved"])} if at["halved"] else {}),
            **({} if result["phases"][1] == 1 else {"phases": "{} of {} begun".format(*result["phases"])}),
            "flops": spent.flops,
            "evaluation_flops": at["eval_flops"],
            "ended": at["ended"] or "all planned steps were made",
            **_counted(job, at, written),
        },
        measured={
            "seconds": round(spent.seconds, 3),
            "tokens_per_second": round(at["tokens"] / spent.seconds, 1) if spent.seconds else None,
            "peak_bytes": spent.peak_bytes,
            "predicted_peak_bytes": job.plan.peak_bytes,
            "peak_over_predicted": round(spent.peak_bytes / max(1, job.plan.peak_bytes), 3),
        },
        tables=(
            Table(title="validation loss", columns=("", "nats a token", "low 95 %", "high 95 %"), rows=tuple(rows)),
        ),
    )


def _counted(job: Job, at: Mapping[str, Any], written: Mapping[str, int]) -> dict[str, int]:
    """Return what was read of rows beside training on them."""
    found = {}
    if job.train.influence:
        found["rows_with_influence"] = written["example_influence"]
    if job.train.batch_selector:
        found |= {"candidates": written["example_choices"], "selection_flops": at["select_flops"] + at["score_flops"]}
    return found


def _loss_row(name: str, loss: dict[str, Any] | None) -> tuple[str, float | None, float | None, float | None]:
    if loss is None or not np.isfinite(loss["loss"]):
        return name, None, None, None
    half = Z95 * loss["se"] if loss["se"] is not None else None
    return (
        name,
        loss["loss"],
        None if half is None else loss["loss"] - half,
        None if half is None else loss["loss"] + half,
    )


def _first(steps: Iterable[int], shown: int = 5) -> str:
    numbers = list(steps)
    return ", ".join(map(str, numbers[:shown])) + (", …" if len(numbers) > shown else "")
