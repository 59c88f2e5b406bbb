"""A segment's windows: what each holds, what it costs, and how many of them a FLOPs limit affords.

Costs follow from lengths alone, before anything runs, so a segment can be planned to the step: its evaluations stand at
equal spacing and its decay ends where it ends. Where a batch selector picks a window's rows among candidates, the
dearest that it could pick are planned with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data_contracts.records import Plan
from stages.meter.flops import FlopModel
from stages.technique.batch_selector import BatchSelector, Picked
from stages.technique.cost import micro_batch_flops
from stages.train.examples import Examples
from stages.train.order import MicroBatch, Visits, lay_out

Price = Callable[[int], FlopModel]
"""What the passes of a step of the segment (0-based) take."""
Beside = Callable[[int], int]
"""Operations of a step of the segment (0-based) beside training's."""


def nothing(step: int) -> int:
    """Return 0."""
    return 0


@dataclass(frozen=True)
class Windows:
    """The windows of one segment.

    Args:
        examples: the selected rows.
        visits: which of them each window holds.
        plan: rows a micro-batch, packed or not.
        selector: picks a window's rows among the visits; None trains on all.
    """

    examples: Examples
    visits: Visits
    plan: Plan
    selector: BatchSelector | None = None

    def candidates(self, step: int) -> tuple[np.ndarray, list[MicroBatch]]:
        """Return the row indices that step `step` (0-based) may train on, and micro-batches that hold one a row."""
        rows = self.visits[step]
        return rows, lay_out(self.examples.lengths[rows].tolist(), self.plan.micro_batch)

    def layout(self, step: int, picked: Picked | None = None) -> tuple[np.ndarray, list[MicroBatch]]:
        """Return the row indices of window `step` (0-based) and its micro-batches over all ranks.

        Where a selector has not `picked` yet, the longest rows that it may pick.
        """
        window = self.visits[step]
        if self.selector is not None:
            longest = np.argsort(-self.examples.lengths[window], kind="stable")[: self.selector.kept(len(window))]
            window = window[np.sort(longest) if picked is None else picked.places]
        row_tokens = self.plan.row_tokens if self.plan.packed else None
        return window, lay_out(self.examples.lengths[window].tolist(), self.plan.micro_batch, row_tokens=row_tokens)

    def turns(self, step: int) -> bool:
        """Return whether window `step` (at least 1) begins in another phase of the selection than the one before."""
        first, second = (self.examples.phases[self.visits[number][0]] for number in (step - 1, step))
        return bool(first != second)

    def flops(self, price: Price, step: int, picked: Picked | None = None) -> int:
        """Return the operations of one step's forward and backward passes, padding included; the most that they may be
        where a selector has not `picked` yet."""
        window, layout = self.layout(step, picked)
        answers, meter = self.examples.answers[window], price(step)
        if self.selector is not None and picked is None:
            answers = np.sort(self.examples.answers[self.visits[step]])[::-1][: len(window)]
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

    def rest_flops(self, price: Price, start: int, stop: int, beside: Beside = nothing) -> int:
        """Return the operations of steps `start` up to `stop`, and of what is done beside each."""
        return sum(self.flops(price, step) + beside(step) for step in range(start, stop))

    def affordable(
        self, price: Price, limit: int | None, evaluation: int, evaluations: int, fixed: int, beside: Beside = nothing
    ) -> int:
        """Return the most steps whose operations, with those of their evaluations, stay within `limit`.

        Args:
            price: of each step.
            limit: operations; None is all steps.
            evaluation: operations of one evaluation.
            evaluations: how many a segment has, fewer where it has fewer steps.
            fixed: operations spent whatever the steps.
            beside: operations of a step that are not training's.
        """
        if limit is None:
            return self.visits.steps
        spent = fixed
        for step in range(self.visits.steps):
            spent += self.flops(price, step) + beside(step)
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
