"""What a pass over the pool takes where a batch selector picks a step's rows among candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stages.meter.flops import FlopModel
from stages.plan.estimate import Estimator
from stages.plan.search import Way
from stages.technique.batch_selector import BatchSelector


@dataclass(frozen=True)
class Picking:
    """A batch selector, what a look at a row takes by passes, and what it takes beside them."""

    selector: BatchSelector
    look: FlopModel
    row: int

    @classmethod
    def of(cls, estimator: Estimator, chosen: Way) -> Picking | None:
        """Return what the chosen way takes; None without a batch selector."""
        selector = estimator.selector
        if selector is None:
            return None
        row = selector.row_flops(estimator.read(chosen.shape.technique))
        return cls(selector, estimator.look(chosen.shape, chosen.recomputed), row)

    def pass_flops(
        self, trained: int, flops: FlopModel, lengths: np.ndarray, answers: np.ndarray, pool: int, steps: int
    ) -> int:
        """Return the operations of a pass over the pool: all rows are looked at, a share of them trained on.

        Args:
            trained: operations of training on all.
            flops: of training.
            lengths, answers: tokens of each row, the target's after those of the `pool`.
            steps: that training on all would make.
        """
        shapes = [(1, int(n), int(a)) for n, a in zip(lengths, answers, strict=True)]
        looks = sum(self.look.train(*shape) for shape in shapes[:pool]) + pool * self.row
        directions = 0
        if self.selector.reads_target:
            often = math.ceil(steps / self.selector.candidates / self.selector.direction_steps)
            directions = often * sum(flops.train(*shape) for shape in shapes[pool:])
        return math.ceil(trained / self.selector.candidates) + looks + directions
