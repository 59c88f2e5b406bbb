"""One segment of training: windows, steps, evaluations, snapshots, the best checkpoint.

Every rank runs `run_segment` on the same `Job`; rank 0 alone writes. Killed at any moment and called again, it goes on
from the last snapshot and leaves the same bytes. It promises at least one step, counts FLOPs before spending them, and
keeps the evaluation with the lowest finite validation loss that has not forgotten too much. Where memory runs out in a
step, micro-batches are halved and it is made again. Making artifacts of what it leaves is `publish.py`'s part.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_contracts.errors import BudgetError
from stages.meter.flops import FlopModel
from stages.meter.memory import reset_peak
from stages.technique.batch_selector import Picked, batch_selector_of
from stages.technique.bounds import Bounds
from stages.technique.noise import NoiseScale
from stages.technique.step import StepResult
from stages.train.best import Best
from stages.train.choosing import Choosing
from stages.train.examples import Examples
from stages.train.guarding import Done, Guarding
from stages.train.halving import cut, within_memory
from stages.train.influence import Influence
from stages.train.job import Job
from stages.train.order import MicroBatch
from stages.train.policy import ask
from stages.train.position import Position, stated
from stages.train.retention import LOSSES, Retaining
from stages.train.rows import Rows
from stages.train.schedule import Schedule
from stages.train.snapshot import Snapshots, generator_states
from stages.train.start import prepare
from stages.train.telemetry import Telemetry, losses_by_place
from stages.train.validate import Loss, Validation
from stages.train.windows import Windows, due_steps
from stages.workers.group import Channel, Group

RESULT, ROWS, SNAPSHOTS = "result.json", "rows", "snapshots"
ACTIONS = ("continue", "anneal", "end")


def run_segment(job: Mapping[str, Any], group: Group, channel: Channel) -> None:
    """Run (or finish) the segment that `job` (a `Job` as JSON data) describes; its result lies in the job's folder."""
    reset_peak()  # what other stages held in this process is none of the segment's
    _Segment(Job.model_validate(job), group, channel).run()


class _Segment:
    def __init__(self, job: Job, group: Group, channel: Channel) -> None:
        self.job, self.group, self.channel, self.first = job, group, channel, group.rank == 0
        plan, train = job.plan, job.train
        self.examples = Examples(Path(job.places.selection), [Path(name) for name in job.places.tokens])
        batch_tokens = plan.micro_batch * plan.row_tokens
        self.validation = Validation(Path(job.places.validation), train.validation_rows, batch_tokens, plan.loss_chunks)
        self.start = prepare(job, group.device)
        self.model, self.optimizer = self.start.model, self.start.optimizer
        visits = self.examples.visits(plan, train, job.order_seed, self.start.visited.get(job.selection, 0))
        selector = batch_selector_of(train)
        self.windows = Windows(self.examples, visits, plan, selector)
        self.choosing = None if selector is None else Choosing(selector, self.model, self.examples, train)
        target_tokens = plan.row_tokens if plan.recomputed_blocks else batch_tokens  # it keeps activations
        how = self.choosing.directed if self.choosing is not None and not train.influence else {}
        target = job.places.target
        self.influence = Influence(Path(target), self.model, train, target_tokens, **how) if target else None
        self.taken = self.optimizer.windows  # before this segment
        self.meter = self.optimizer.price(self.taken) if self.first else None
        torch.manual_seed(job.torch_seed + 1 + group.rank)
        self.best = Best(job.home, job.pin)
        self.snapshots = Snapshots(job.home / SNAPSHOTS, job.digest, self.start.beginning)
        found = self.snapshots.latest()
        chunks = found.state["chunks"] if found else ()
        self.retaining = Retaining.of(job, batch_tokens, chunks, job.home / ROWS)
        if found is None:
            self.planned = self._plan_steps()
            schedule = self.start.schedule
            if job.anneals:
                share = 1.0 if job.closes else train.decay_share
                schedule = schedule.annealing(0, self.planned, share, self.start.run_step)
            self.at = Position(self.planned, schedule.state(), guard=self.start.guard)
        else:
            self.planned, self.at = int(found.state["planned"]), Position(**found.state["position"])
            found.restore(self.optimizer, group)
            if self.influence is not None:
                self.influence.hold(found.direction())
        if self.at.micro_batch is not None:
            self.windows = cut(self.windows, self.at.micro_batch)
        self.telemetry = Telemetry(Rows(job.home / ROWS, chunks), self.start.run_step, self.at)
        self.schedule, self.noise = Schedule.of(self.at.schedule), NoiseScale.of(self.at.noise)
        self.due = due_steps(self.planned, train.evaluations)
        self.guarding = Guarding(train, self.at, self.snapshots, self.start.run_step)
        self.schedule = self.guarding.sooner(self.schedule)
        self.fresh = found is None

    def _price(self, step: int) -> FlopModel:
        """Return what the passes of step `step` of the segment (0-based) take."""
        return self.optimizer.price(self.taken + step)

    def _beside(self, step: int) -> int:
        """Return the operations of step `step` that are not training's, at the most."""
        if self.choosing is None or self.meter is None:
            return 0
        looks, influence = self.choosing.flops(self.windows, step), self.influence
        return looks + (influence.flops(self.meter) if influence is not None and influence.due(step, False) else 0)

    def _plan_steps(self) -> int:
        """Return how many steps the segment makes: those of its epochs, or fewer where its FLOPs end before."""
        steps, limit, train = 0, self.job.segment_flops, self.job.train
        if self.meter is not None:
            one = self._reading(self.meter)[0]
            fixed = one if self.job.evaluate_start else 0
            if self.influence is not None and train.influence:  # made at the start, and again at each but the last
                direction = self.influence.flops(self.meter)
                one, fixed = (one + direction, fixed) if train.influence == "evaluation" else (one, fixed + direction)
            steps = self.windows.affordable(self._price, limit, one, train.evaluations, fixed, self._beside)
        (agreed,) = self.group.agree([steps])
        if agreed == 0:
            raise BudgetError(
                "a segment makes at least one optimizer step",
                f"0 steps: its first step and evaluation cost more than the {limit} FLOPs left to it",
                "raise the budget, or plan a smaller window or fewer validation rows",
            )
        return int(agreed)

    def run(self) -> None:
        at = self.at
        if self.fresh and self.guarding.guard:  # what it can go back to before the first snapshot is due
            self.guarding.keep() if self.snapshots.beginning else self._snapshot()
        if at.step == 0 and self.job.evaluate_start:
            loss = self._evaluate()
            at.before = stated(self.start.run_step, loss)
            if self.first:
                self.telemetry.curve(None, loss, phase="warmup", rate=0.0, epoch=0.0, noise=None, guarded=Done())
        elif at.before is None:
            at.before = self.start.validation
        self.model.train()
        self._direct(again=False)
        while at.step < at.steps:
            self._step()
            self.channel.progress(at.step, at.steps)
            if at.step % self.job.train.snapshot_steps == 0 and at.step < at.steps:
                self._snapshot()
        self._finish()

    def _step(self) -> None:
        began, at, group = time.perf_counter(), self.at, self.group
        rate, phase = self._rate()
        self.windows, made = within_memory(self._attempt, self.windows, at, self.start.run_step, group.device)
        window, mine, result, bounds, picked = made
        rate *= self.guarding.limits().scale
        tokens = int(self.examples.lengths[window].sum())
        at.flops += self.windows.flops(self._price, at.step, picked) if self.meter else 0
        at.step, at.tokens = at.step + 1, at.tokens + tokens
        if not result.applied:
            at.skipped.append(self.start.run_step + at.step)
        if result.norms is not None:
            self.noise.update(result.norms)
        at.score_flops += self.influence.spent(group) if self.influence is not None else 0
        found = losses_by_place(window, mine, result, group)
        guarded = self.guarding.see(result, bounds, found, self.optimizer, group)
        self.schedule = self.guarding.sooner(self.schedule)
        if at.step < at.steps and self.windows.turns(at.step):
            self.guarding.new_rows()
        if self.choosing is not None and picked is not None:
            self.choosing.note(self.windows, at, picked, self.telemetry if self.first else None)
            began += self.choosing.seconds
        if self.first:
            self.telemetry.visits(window, self.examples, found)
            self.telemetry.timing("step", began, tokens)
        loss = self._evaluate() if at.step in self.due or at.step == at.steps else None
        if self.first:
            epoch = self.windows.epoch(at.step)
            noise = self.noise.value
            self.telemetry.curve(result, loss, phase=phase, rate=rate, epoch=epoch, noise=noise, guarded=guarded)
        if loss is not None:
            if at.improves(loss):
                self._keep(loss, rate)
            self.channel.report({"step": at.step, "steps": at.steps, "validation_loss": loss.mean})
            self._ask()
            if at.step == at.steps and self.schedule.decay_from is None and at.goes_on(loss):
                self._keep(loss, rate)
            self.model.train()
        if at.step < at.steps:
            self._direct(again=self.influence is not None and self.influence.due(at.step, loss is not None))

    def _rate(self) -> tuple[float, str]:
        """Return the scheduled rate of the next step and its phase; a state that was put back warms up from where it
        stood."""
        return self.schedule.at(self.at.step, self.start.run_step + self.at.step - self.at.lost)

    def _attempt(
        self, windows: Windows
    ) -> tuple[np.ndarray, list[MicroBatch], StepResult, Bounds | None, Picked | None]:
        group, plan, limits, bounds = self.group, self.job.plan, self.guarding.limits(), self.guarding.bounds()
        picked, factors = None, None
        if self.choosing is not None:
            direction = self.influence.direction if self.influence is not None else {}
            picked = self.choosing.choose(windows, self.at.step, self.optimizer, direction, group, plan.precision)
            factors = picked.weight_S
        window, layout = windows.layout(self.at.step, picked)
        mine = layout[group.rank :: group.size]
        batches = [self.examples.batch(window, micro, plan.packed, factors).to(group.device) for micro in mine]
        if plan.sharded and len(mine) * group.size < len(layout):  # all pass or none can
            batches.append(self.examples.batch(window, layout[0], plan.packed).to(group.device).weightless())
        result = self.optimizer.step(
            batches,
            limits.scale * self._rate()[0],
            clip=limits.clip,
            precision=plan.precision,
            all_reduce=group.sum_ if group.size > 1 else None,
            loss_chunks=plan.loss_chunks,
            products=self.influence.products if self.influence is not None and self.influence.read else None,
            in_backward=plan.update_in_backward,
            host="cpu" if plan.offload_activations else None,
            bounds=bounds,
        )
        return window, mine, result.of(sum(len(micro.places) for micro in mine)), bounds, picked

    def _evaluate(self) -> Loss:
        began, at = time.perf_counter(), self.at
        loss, documents = self.validation(self.model, self.group, self.job.plan.precision)
        found = {"validation_losses": documents}
        if self.retaining is not None:
            retained, found[LOSSES] = self.retaining(self.model, self.group, self.job.plan.precision)
            loss = replace(loss, retained=retained)
        flops, tokens = self._reading(self.meter)
        at.evaluated, at.eval_tokens, at.eval_flops = at.evaluated + 1, at.eval_tokens + tokens, at.eval_flops + flops
        if self.first:
            for table, documents in found.items():
                self.telemetry.documents(table, documents)
            self.telemetry.timing("evaluation", began, tokens)
        return loss

    def _reading(self, meter: FlopModel | None) -> tuple[int, int]:
        """Return (operations, tokens) of one evaluation; 0 operations without a meter."""
        read = [rows for rows in (self.validation, self.retaining) if rows is not None]
        return sum(rows.flops(meter) for rows in read) if meter else 0, sum(rows.tokens for rows in read)

    def _direct(self, *, again: bool) -> None:
        """Make the direction of influence where there is none yet, or `again`; before any update there are no moments
        to make it from."""
        at, influence = self.at, self.influence
        if influence is None or not self.optimizer.updates or (influence.direction and not again):
            return
        began = time.perf_counter()
        influence.make(self.optimizer, self.group, self.job.plan.precision)
        at.direction_step, at.score_tokens = self.start.run_step + at.step, at.score_tokens + influence.tokens
        if self.meter is not None:
            at.score_flops += influence.flops(self.meter)
            self.telemetry.timing("direction", began, influence.tokens)
        self.model.train()

    def _keep(self, loss: Loss, rate: float) -> None:
        """Keep this evaluation's weights and optimizer: the segment's best, or beside it the end to go on from."""
        at, run_step = self.at, self.start.run_step + self.at.step
        kept = stated(run_step, loss)
        if at.improves(loss):
            at.best = kept
        else:
            at.end = kept
        if self.first or self.job.plan.sharded:
            trainer = {
                "technique": self.start.technique,
                "step": run_step,
                "tokens": self.start.run_tokens + at.tokens,
                "learning_rate": rate,
                "updates": self.optimizer.updates,
                "optimizer": self.optimizer.plain(),
                "beta2": self.job.train.beta2,
                "epsilon": self.job.train.epsilon,
                "schedule": {**self.schedule.state(), "step": at.step, "steps": at.steps},
                "validation": kept,
                "visited": self.start.visited | {self.job.selection: self.windows.visits.visited(at.step)},
            }
            self.best.write(run_step, self.model, self.optimizer, trainer, first=self.first)

    def _ask(self) -> None:
        """Let the policy end the segment or begin its decay; rank 0 asks, all do."""
        job, at = self.job, self.at
        if job.policy is None or at.step >= at.steps:
            return
        word = 0
        if self.meter is not None:
            choice = ask(
                job.policy,
                self.telemetry.rows.curve,
                start=at.before,
                remaining=job.remaining,
                spent=at.spent,
                rest_flops=self.windows.rest_flops(self._price, at.step, at.steps, self._beside),
                annealing=self.schedule.decay_from is not None,
                metric=job.metric,
                direction=job.direction,
                retention=self.retaining.began if self.retaining else None,
            )
            word = ACTIONS.index(choice.action)
            made = {"step": self.telemetry.run_step, "action": choice.action, "reason": choice.reason}
            self.telemetry.rows.add("choices", made)
            at.ended = choice.reason if word else at.ended
        (agreed,) = self.group.agree([word])
        if ACTIONS[int(agreed)] == "end":
            at.steps = at.step
        elif ACTIONS[int(agreed)] == "anneal":
            self.schedule, at.steps = self.schedule.decaying_now(at.step, at.steps, job.train.decay_share)

    def _state(self) -> dict[str, Any]:
        self.at.schedule, self.at.noise = self.schedule.state(), self.noise.state()
        chunks = self.telemetry.rows.flush(self.at.step)
        return {"position": asdict(self.at), "planned": self.planned, "chunks": chunks}

    def _snapshot(self) -> None:
        self.guarding.keep()
        rng, spread = generator_states(self.group), self.group if self.job.plan.sharded else None
        if self.first or spread:
            direction = self.influence.direction if self.influence is not None else {}
            state = self._state() if self.first else {}
            self.snapshots.write(self.at.step, self.optimizer, rng, state, direction, spread)
        if self.first:
            self.best.keep(self.snapshots.best_steps() | ({self.at.best["step"]} if self.at.best else set()))

    def _finish(self) -> None:
        if self.first:
            result = {**self._state(), "work": self.job.digest, "rows": len(self.examples)}
            result |= {"technique": self.start.technique, "run_step": self.telemetry.run_step}
            result["phases"] = self.windows.visits.phases_after(self.at.step)
            scratch = self.job.home / f".{RESULT}"
            scratch.write_text(json.dumps(result), encoding="utf-8")
            os.replace(scratch, self.job.home / RESULT)
        self.group.wait()
