"""A segment's windows: what each holds, what it costs, and how many of them a FLOPs limit affords.

Costs follow from lengths alone, before anything runs, so a segment can be planned to the step: its evaluations stand at
equal spacing and its decay ends where it ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data_contracts.records import Plan
from stages.meter.flops import FlopModel
from stages.technique.cost import micro_batch_flops
from stages.train.examples import Examples
from stages.train.order import MicroBatch, Visits, lay_out

Price = Callable[[int], FlopModel]
"""What the passes of a step of the segment (0-based) take."""


@dataclass(frozen=True)
class Windows:
    """The windows of one segment.

    Args:
        examples: the selected rows.
        visits: which of them each window holds.
        plan: rows a micro-batch, packed or not.
    """

    examples: Examples
    visits: Visits
    plan: Plan

    def layout(self, step: int) -> tuple[np.ndarray, list[MicroBatch]]:
        """Return the row indices of window `step` (0-based) and its micro-batches over all ranks."""
        window = self.visits[step]
        row_tokens = self.plan.row_tokens if self.plan.packed else None
        return window, lay_out(self.examples.lengths[window].tolist(), self.plan.micro_batch, row_tokens=row_tokens)

    def turns(self, step: int) -> bool:
        """Return whether window `step` (at least 1) begins in another phase of the selection than the one before."""
        first, second = (self.examples.phases[self.visits[number][0]] for number in (step - 1, step))
        return bool(first != second)

    def flops(self, price: Price, step: int) -> int:
        """Return the operations of one step's forward and backward passes, padding included."""
        window, layout = self.layout(step)
        answers, meter = self.examples.answers[window], price(step)
        passes = sum(
            micro_batch_flops(
                meter,
                len(micro.rows),
                micro.padded,
                int(answers[micro.places].sum()),
                loss_chunks=self.plan.loss_chunks,
                update_in_backward=self.plan.update_in_backward,
            )
            for micro in layout
        )
        return passes + meter.beside(len(layout), 1)

    def rest_flops(self, price: Price, start: int, stop: int) -> int:
        """Return the operations of steps `start` up to `stop`."""
        return sum(self.flops(price, step) for step in range(start, stop))

    def affordable(self, price: Price, limit: int | None, evaluation: int, evaluations: int, fixed: int) -> int:
        """Return the most steps whose operations, with those of their evaluations, stay within `limit`.

        Args:
            price: of each step.
            limit: operations; None is all steps.
            evaluation: operations of one evaluation.
            evaluations: how many a segment has, fewer where it has fewer steps.
            fixed: operations spent whatever the steps.
        """
        if limit is None:
            return self.visits.steps
        spent = fixed
        for step in range(self.visits.steps):
            spent += self.flops(price, step)
            if spent + evaluation * min(evaluations, step + 1) > limit:
                return step
        return self.visits.steps

    def epoch(self, step: int) -> float:
        """Return passes over the selection after `step` steps, those of the segments before among them."""
        return self.visits.visited(step) / self.visits.epoch_visits


def due_steps(steps: int, evaluations: int) -> frozenset[int]:
    """Return the steps (1-based) after which to evaluate: equally spaced, the last one among them."""
    count = min(evaluations, steps)
    return frozenset(math.ceil(steps * number / count) for number in range(1, count + 1))
