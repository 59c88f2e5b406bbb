"""Carries out what the guard decides: limits of a step, what the step showed, an earlier state put back.

The ring of earlier states is on disk: the segment's start and the last resume snapshots that were taken out of trouble.
So it costs no memory, nothing is written that would not be, but for a start that no checkpoint holds, and a resumed
segment finds the same states. Rows and steps go on where they are; what is put back are weights and optimizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from data_contracts.config import TrainConfig
from stages.technique.bounds import Bounds
from stages.technique.optimizer import Optimizer
from stages.technique.step import StepResult
from stages.train.guard import Guard, Limits, Seen
from stages.train.position import Position
from stages.train.schedule import Schedule
from stages.train.snapshot import Snapshots
from stages.train.validate import ratio_estimate
from stages.workers.group import Group


@dataclass(frozen=True)
class Done:
    """What the guard saw and did at a step: columns of the curve.

    Args:
        regime: that the step was taken in; "off" without a guard.
        action: "", "slower", "tighter clip", "skipped" or "back to step N", where several the last.
        scale: factor on the learning rate.
        moved, promised: see `Seen`.
    """

    regime: str = "off"
    action: str = ""
    scale: float = 1.0
    moved: float | None = None
    promised: float | None = None


class Guarding:
    """The guard of one segment.

    Args:
        train: its settings, and the clip.
        at: the segment's position, which keeps the guard's state.
        snapshots: where earlier states lie.
        run_step: steps of the run before the segment.
    """

    def __init__(self, train: TrainConfig, at: Position, snapshots: Snapshots, run_step: int) -> None:
        self.guard = None if train.guard is None else Guard.of(train.guard, train.clip, at.guard)
        self._plain, self._at, self._snapshots, self._run_step = Limits(1.0, train.clip), at, snapshots, run_step

    def limits(self) -> Limits:
        """Return what holds for the next step."""
        return self.guard.limits() if self.guard else self._plain

    def sooner(self, schedule: Schedule) -> Schedule:
        """Return the schedule, with a decay that is due begun at once where even the least factor on the rate is too
        much: it falls from there to the segment's end."""
        at, due = self._at, schedule.decay_from
        if self.guard is None or not self.guard.floored or due is None or due <= at.step:
            return schedule
        return schedule.annealing(at.step, at.steps, 1.0)

    def bounds(self) -> Bounds | None:
        """Return the bounds of the next step, which measure it."""
        limits = self.limits()
        return Bounds(limits.loss, limits.norm) if self.guard else None

    def keep(self) -> None:
        """Note the state that a snapshot is about to be made of, where it is worth going back to."""
        if self.guard:
            self.guard.keep(self._at.step)
            self._at.guard = self.guard.state()

    def new_rows(self) -> None:
        """Say that rows of another phase come from now on."""
        if self.guard:
            self.guard.new_rows()

    def see(
        self, result: StepResult, bounds: Bounds | None, found_3D: torch.Tensor, optimizer: Optimizer, group: Group
    ) -> Done:
        """Let the guard see the step that was just made, and put an earlier state back where it says so.

        Args:
            result: of the step.
            bounds: that the step was given.
            found_3D: loss sum and answer tokens of each document over all ranks, in the first two rows.
            optimizer: that made it; its count of windows goes on.
            group: the ranks, which all decide alike.
        """
        if self.guard is None or bounds is None:
            return Done()
        at, before, regime = self._at, self.limits(), self.guard.regime
        if result.loss is None:  # no token counts in this window
            return Done(regime, scale=before.scale)
        told = (math.nan if value is None else value for value in bounds.told())
        moved, promised = (None if math.isnan(value) else value for value in group.agree(list(told)))
        counted = found_3D[:2, found_3D[1] > 0]
        error = ratio_estimate(counted[0], counted[1]).se
        seen = Seen(result.loss, error, result.gradient_norm, moved, promised)
        back = self.guard.see(seen)
        action = "slower" if before.scale < 1 else ""
        action = "tighter clip" if before.clip < self._plain.clip else action
        if not result.applied:
            action = "skipped"
            at.withheld += [self._run_step + at.step] if seen.finite else []
        if back is not None:
            windows, state = optimizer.windows, self._snapshots.at(back)
            state.put(optimizer, group)
            optimizer.windows = windows
            at.lost = at.step - back + int(state.state["position"]["lost"])
            at.returned.append([self._run_step + at.step, self._run_step + back])
            action = f"back to step {self._run_step + back}"
        at.slowest = min(at.slowest, before.scale)
        at.guard = self.guard.state()
        return Done(regime, action, before.scale, moved, promised)
