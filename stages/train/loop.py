"""One segment of training: windows, steps, evaluations, snapshots, the best checkpoint.

Every rank runs `run_segment` on the same `Job`; rank 0 alone writes. Killed at any moment and called again, it goes on
from the last snapshot and leaves the same bytes. It promises at least one step, counts FLOPs before spending them, and
keeps the evaluation with the lowest finite validation loss. Making artifacts of what it leaves is `publish.py`'s part.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from data_contracts.cost import Cost
from data_contracts.errors import BudgetError
from stages.meter.flops import FlopModel
from stages.meter.memory import peak_bytes
from stages.model.checkpoint import save_checkpoint
from stages.technique.noise import NoiseScale
from stages.technique.step import StepResult, moments_of, optimizer_step
from stages.train.examples import Examples
from stages.train.job import Job
from stages.train.order import MicroBatch, Visits
from stages.train.policy import ask
from stages.train.rows import Rows
from stages.train.schedule import Schedule
from stages.train.snapshot import Snapshot, Snapshots, generator_states
from stages.train.start import prepare
from stages.train.validate import Loss, Validation
from stages.train.windows import Windows, due_steps
from stages.workers.group import Channel, Group

RESULT, BEST, ROWS, SNAPSHOTS = "result.json", "best", "rows", "snapshots"
ACTIONS = ("continue", "anneal", "end")


@dataclass
class Position:
    """Where a segment stands: all of its state besides tensors and rows."""

    steps: int
    schedule: dict[str, Any]
    step: int = 0
    updates: int = 0
    tokens: int = 0
    flops: int = 0
    eval_flops: int = 0
    eval_tokens: int = 0
    evaluated: int = 0
    skipped: list[int] = field(default_factory=list)
    best: dict[str, Any] | None = None
    before: dict[str, Any] | None = None
    noise: dict[str, float] = field(default_factory=lambda: NoiseScale().state())
    ended: str = ""


def run_segment(job: Mapping[str, Any], group: Group, channel: Channel) -> None:
    """Run (or finish) the segment that `job` (a `Job` as JSON data) describes; its result lies in the job's folder."""
    _Segment(Job.model_validate(job), group, channel).run()


class _Segment:
    def __init__(self, job: Job, group: Group, channel: Channel) -> None:
        self.job, self.group, self.channel = job, group, channel
        plan = job.plan
        self.examples = Examples(Path(job.places.selection), [Path(name) for name in job.places.tokens])
        width = plan.micro_batch * plan.accumulation * group.size
        visits = Visits(self.examples.repeats, job.train.epochs, width, job.order_seed, job.train.drop_last)
        self.windows = Windows(self.examples, visits, plan)
        self.validation = Validation(
            Path(job.places.validation), job.train.validation_rows, plan.micro_batch * plan.row_tokens
        )
        self.start = prepare(job, group.device)
        self.model, self.optimizer = self.start.model, self.start.optimizer
        self.meter = FlopModel.trace(self.model, train=True) if group.rank == 0 else None
        torch.manual_seed(job.torch_seed + 1 + group.rank)
        self.snapshots = Snapshots(job.home / SNAPSHOTS, job.digest)
        snapshot = self.snapshots.latest()
        self.at = self._fresh() if snapshot is None else self._resumed(snapshot)
        self.schedule = Schedule.of(self.at.schedule)
        self.noise = NoiseScale.of(self.at.noise)
        self.due = due_steps(self.planned, job.train.evaluations)

    def _fresh(self) -> Position:
        self.rows = Rows(self.job.home / ROWS)
        one = self.validation.flops(self.meter) if self.meter else 0
        fixed = one if self.job.evaluate_start else 0
        limit, evaluations = self.job.segment_flops, self.job.train.evaluations
        steps = self.windows.affordable(self.meter, limit, one, evaluations, fixed) if self.meter else 0
        (steps,) = map(int, self.group.agree([steps]))
        self.planned = steps
        if steps == 0:
            raise BudgetError(
                "a segment makes at least one optimizer step",
                f"0 steps: its first step and evaluation cost more than the {self.job.segment_flops} FLOPs left to it",
                "raise the budget, or plan a smaller window or fewer validation rows",
            )
        schedule = self.start.schedule
        if self.job.anneals:
            schedule = schedule.annealing(0, self.planned, self.job.train.decay_share)
        return Position(self.planned, schedule.state(), updates=self.start.updates)

    def _resumed(self, snapshot: Snapshot) -> Position:
        state = dict(snapshot.state["position"])
        self.planned = int(snapshot.state["planned"])
        self.rows = Rows(self.job.home / ROWS, snapshot.state["chunks"])
        snapshot.restore(self.model, self.optimizer, self.group)
        return Position(**state)

    def run(self) -> None:
        at = self.at
        if at.step == 0 and self.job.evaluate_start:
            loss = self._evaluate()
            at.before = _stated(self.start.run_step, loss)
            self._curve_row(None, loss, "warmup", 0.0)
        elif at.before is None:
            at.before = self.start.validation
        self.model.train()
        while at.step < at.steps:
            self._step()
            self.channel.progress(at.step, at.steps)
            if at.step % self.job.train.snapshot_steps == 0 and at.step < at.steps:
                self._snapshot()
        self._finish()

    def _step(self) -> None:
        began, at = time.perf_counter(), self.at
        window, layout = self.windows.layout(at.step)
        mine = layout[self.group.rank :: self.group.size]
        batches = [self.examples.batch(window, micro, self.job.plan.packed).to(self.group.device) for micro in mine]
        rate, phase = self.schedule.at(at.step, self.start.run_step + at.step)
        for options in self.optimizer.param_groups:
            options["lr"] = rate
        result = optimizer_step(
            self.model,
            self.optimizer,
            batches,
            clip=self.job.train.clip,
            precision=self.job.plan.precision,
            all_reduce=self.group.sum_ if self.group.size > 1 else None,
        )
        tokens = int(self.examples.lengths[window].sum())
        at.flops += self.windows.flops(self.meter, at.step) if self.meter else 0
        at.step += 1
        at.tokens += tokens
        at.updates += result.applied
        if not result.applied:
            at.skipped.append(self.start.run_step + at.step)
        if result.norms is not None:
            self.noise.update(result.norms)
        self._example_rows(window, mine, result)
        self._timing("step", began, tokens)
        loss = self._evaluate() if at.step in self.due or at.step == at.steps else None
        self._curve_row(result, loss, phase, rate)
        if loss is not None:
            self._keep_if_best(loss, rate)
            self.channel.report({"step": at.step, "steps": at.steps, "validation_loss": loss.mean})
            self._ask()
            self.model.train()

    def _evaluate(self) -> Loss:
        began = time.perf_counter()
        loss = self.validation(self.model, self.group, self.job.plan.precision)
        self.at.evaluated += 1
        self.at.eval_tokens += self.validation.tokens
        if self.meter is not None:
            self.at.eval_flops += self.validation.flops(self.meter)
        self._timing("evaluation", began, self.validation.tokens)
        return loss

    def _keep_if_best(self, loss: Loss, rate: float) -> None:
        """Keep weights and moments where `loss` is finite and below every one before."""
        at = self.at
        if not loss.finite or (at.best is not None and loss.mean >= at.best["loss"]):
            return
        run_step = self.start.run_step + at.step
        at.best = {**_stated(run_step, loss), "segment_step": at.step}
        if self.group.rank == 0:
            folder = self.job.home / BEST / str(run_step)
            shutil.rmtree(folder, ignore_errors=True)  # of a life before this one, the same or cut short
            trainer = {
                "technique": self.start.technique,
                "step": run_step,
                "tokens": self.start.run_tokens + at.tokens,
                "learning_rate": rate,
                "updates": at.updates,
                "schedule": {**self.schedule.state(), "step": at.step, "steps": at.steps},
                "validation": _stated(run_step, loss),
            }
            moments = moments_of(self.optimizer, self.model)
            save_checkpoint(folder, self.model, self.job.pin, moments, trainer)

    def _ask(self) -> None:
        """Let the policy end the segment or begin its decay; rank 0 asks, all do."""
        job, at = self.job, self.at
        if job.policy is None or at.step >= at.steps:
            return
        word = 0.0
        if self.meter is not None:
            before = at.before and {"step": at.before["step"], "flops": 0, "tokens": 0,
                                    "validation_loss": at.before["loss"], "validation_se": at.before["se"]}  # fmt: skip
            choice = ask(
                job.policy,
                self.rows.curve if not job.evaluate_start else self.rows.curve[1:],
                start=before,
                remaining=job.remaining,
                spent=Cost(flops=at.flops + at.eval_flops, tokens=at.tokens + at.eval_tokens),
                rest_flops=self.windows.rest_flops(self.meter, at.step, at.steps),
                annealing=self.schedule.decay_from is not None,
                metric=job.metric,
                direction=job.direction,
            )
            word = float(ACTIONS.index(choice.action))
            at.ended = choice.reason if word else at.ended
        action = ACTIONS[int(self.group.agree([word])[0])]
        if action == "end":
            at.steps = at.step
        elif action == "anneal":
            self.schedule, at.steps = self.schedule.decaying_now(at.step, at.steps, job.train.decay_share)

    def _example_rows(self, window: Any, mine: list[MicroBatch], result: StepResult) -> None:
        found = torch.zeros(2, len(window), dtype=torch.float64)
        places = [place for micro in mine for place in micro.places]
        found[0, places] = result.document_loss_D.double().cpu()
        found[1, places] = result.document_tokens_D.double().cpu()
        placed = found.to(self.group.device)
        self.group.sum_([placed])
        if self.group.rank:
            return
        for place, (loss, count) in enumerate(placed.cpu().T.tolist()):
            if count:
                self.rows.add(
                    "example_losses",
                    {
                        "step": self.start.run_step + self.at.step,
                        "position": place,
                        "example_id": self.examples.row(int(window[place])).example_id,
                        "loss_sum": loss,
                        "answer_tokens": int(count),
                    },
                )

    def _curve_row(self, result: StepResult | None, loss: Loss | None, phase: str, rate: float) -> None:
        at = self.at
        if self.group.rank:
            return
        self.rows.add(
            "curve",
            {
                "step": self.start.run_step + at.step,
                "phase": phase,
                "epoch": self.windows.epoch(at.step),
                "tokens": at.tokens,
                "flops": at.flops + at.eval_flops,
                "train_loss": result.loss if result else None,
                "validation_loss": loss.mean if loss else None,
                "validation_se": loss.se if loss else None,
                "gradient_norm": result.gradient_norm if result else None,
                "gradient_noise": self.noise.value if result and result.norms else None,
                "learning_rate": rate,
            },
        )

    def _timing(self, what: str, began: float, tokens: int) -> None:
        if self.group.rank == 0:
            seconds = time.perf_counter() - began
            row = {"step": self.start.run_step + self.at.step, "what": what, "seconds": seconds, "tokens": tokens}
            self.rows.add("timing", {**row, "peak_bytes": peak_bytes()})

    def _position(self) -> dict[str, Any]:
        self.at.schedule, self.at.noise = self.schedule.state(), self.noise.state()
        return {"position": asdict(self.at), "planned": self.planned, "best": self.at.best, "updates": self.at.updates}

    def _snapshot(self) -> None:
        rng = generator_states(self.group)
        if self.group.rank == 0:
            state = {**self._position(), "chunks": self.rows.flush(self.at.step)}
            self.snapshots.write(self.at.step, self.model, self.optimizer, rng, state)
            kept = self.snapshots.best_steps() | ({self.at.best["step"]} if self.at.best else set())
            for folder in (self.job.home / BEST).glob("[0-9]*"):
                if int(folder.name) not in kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def _finish(self) -> None:
        if self.group.rank == 0:
            result = {
                **self._position(),
                "chunks": self.rows.flush(self.at.step),
                "work": self.job.digest,
                "rows": len(self.examples),
                "run_step": self.start.run_step + self.at.step,
                "technique": self.start.technique,
            }
            scratch = self.job.home / f".{RESULT}"
            scratch.write_text(json.dumps(result), encoding="utf-8")
            os.replace(scratch, self.job.home / RESULT)
        self.group.wait()


def _stated(step: int, loss: Loss) -> dict[str, Any]:
    return {"step": step, "loss": loss.mean, "se": loss.se}
