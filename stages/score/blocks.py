"""Scoring a stretch of the pool: length buckets, isolation of what fails, one row of the result for each example.

A batch that raises is cut in two until the example at fault stands alone; that one is refused with its reason and all
others are scored. Nothing here knows a method, a file or the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from data_contracts.errors import LazyTrainError, MethodError
from stages.score.scorer import Block, Feature, Scorer


@dataclass
class Outcome:
    """One example's result: its columns (and its feature, where the method makes them), or why there are none."""

    columns: np.ndarray
    loss: float
    reason: str = ""
    detail: str = ""
    feature: Feature | None = None


@dataclass
class BlockScorer:
    """Scores rows of the pool with one prepared method.

    Args:
        method, state: the scorer and what its `prepare` returned.
        block_of: makes the block of some row numbers.
        settle: called with each block that was scored (to count its cost).
        combine: how columns become one score, for the check that it is finite.
    """

    method: Scorer
    state: Any
    block_of: Callable[[Sequence[int]], Block]
    settle: Callable[[Block], None]
    combine: Literal["mean", "max"]
    failures: list[str] = field(default_factory=list)

    def score(self, rows: Sequence[int]) -> list[Outcome]:
        """Return an outcome for each row, in the order given.

        Raises what the project's own code raises about the whole (a `LazyTrainError`), and `MethodError` where the
        method's answer has another shape than its family promises.
        """
        try:
            block = self.block_of(rows)
            columns_BJ = self._columns(block)
        except LazyTrainError:
            raise
        except Exception as error:
            return self._isolate(rows, error)
        self.settle(block)
        return [self._outcome(block, index, columns_BJ[index]) for index in range(len(rows))]

    def _isolate(self, rows: Sequence[int], error: Exception) -> list[Outcome]:
        if len(rows) > 1:
            middle = len(rows) // 2
            return self.score(rows[:middle]) + self.score(rows[middle:])
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"[:300]
        self.failures.append(text)
        none = np.zeros(0, dtype=np.float32)
        return [Outcome(none, np.nan, "score_failed", f"{self.method.name()} could not score it: {text}")]

    def _columns(self, block: Block) -> np.ndarray:
        found = np.asarray(self.method.score(block, self.state))
        found = found[:, None] if found.ndim == 1 else found
        if found.ndim != 2 or len(found) != len(block.example_ids) or found.shape[1] < 1:
            raise MethodError(
                f"scorer {self.method.name()} gives a row of numbers for each of {len(block.example_ids)} examples",
                f"it gave an array of shape {found.shape}",
                "return score_B or score_BJ, NaN for an example that cannot be scored",
            )
        with np.errstate(over="ignore"):
            return found.astype(np.float32)

    def _outcome(self, block: Block, index: int, columns_J: np.ndarray) -> Outcome:
        loss = float(block.mean_loss[index])
        if np.isfinite(columns_J).all() and np.isfinite(combined(columns_J, self.combine)):
            return Outcome(columns_J, loss, feature=block.features[index] if block.features else None)
        none = np.zeros(0, dtype=np.float32)
        if index in block.refused:
            return Outcome(none, loss, *block.refused[index])
        if block.losses and block.losses["tokens"][index] == 0:
            return Outcome(none, np.nan, "no_answer_token", "no token is predicted: its answer is the first token")
        if block.losses and not np.isfinite(loss):
            return Outcome(none, np.nan, "loss_not_finite", f"the model's loss on it is {loss}; look at its text")
        bad = columns_J[~np.isfinite(columns_J)]
        return Outcome(none, loss, "score_not_finite", f"its score is {bad[0] if len(bad) else 'out of range'}")


def combined(columns_J: np.ndarray, how: Literal["mean", "max"]) -> float:
    """Return one float32 score of an example's columns."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = columns_J.max() if how == "max" else columns_J.mean(dtype=np.float64)
        return float(np.float32(value))
