"""Learning trajectory: an example's loss at several moments of training, the rows that S2L clusters.

Columns are the mean losses at `points` visits, spread evenly from the first to the last; the score is their combination
(`score.combine`), a measure of how hard the example stayed. S2L itself makes no score: a selector that clusters reads
the columns (`group_scores`). Costs nothing: training logs every visit's loss. An example with fewer visits has no
trajectory, and is quarantined saying so rather than given a guess: train over the whole pool for as many epochs first,
with a small model say, as S2L does, and give that run's `example_losses`.
Source: Yang et al. 2024 (S2L), section 4: a row of token-mean losses over the proxy's checkpoints.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stages.score.scorer import Block, Given, Scorer
from stages.statistics.trajectories import Trajectories


class LearningTrajectory(Scorer):
    """Mean losses (nats a token) at `points` visits, one column each."""

    reads = frozenset({"example_losses"})
    supported = True

    points: int = Field(3, ge=2, description="Columns; an example needs so many visits.")

    def prepare(self, given: Given) -> Trajectories:
        """Read the losses that training logged."""
        return Trajectories(given.example_losses)

    def score(self, block: Block, state: Trajectories) -> np.ndarray:
        """Return score_BJ, J the points; NaN for an example with fewer visits."""
        score_BJ = np.full((len(block.example_ids), self.points), np.nan, dtype=np.float32)
        for index, example_id in enumerate(block.example_ids):
            loss_V = state.of(example_id)
            if len(loss_V) < self.points:
                detail = f"training visited it {len(loss_V)} times, of {self.points} that are needed"
                block.refuse(index, "too_few_visits", detail)
                continue
            score_BJ[index] = loss_V[np.linspace(0, len(loss_V) - 1, self.points).round().astype(int)]
        return score_BJ
