"""Forgetting: how often training lost again what it had learned of an example.

An event is a visit at which the example's mean loss stands more than `rise` above that of the visit before. The score
is their number: an example that is never forgotten teaches nothing more and goes first. Costs nothing: training logs
every visit's loss. It needs at least two visits; an example without them has no score and says so in the quarantine, so
this is for a pool that training went through whole, twice or more (the warm-up and a selection leave most rows out).
Source: Toneva et al. 2019, whose accuracy turns from 1 to 0; a language model has losses, so a rise counts. An example
that is never learned ranks last there; here it shows as one that keeps rising and falling, or not at all.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stages.score.scorer import Block, Given, Scorer
from stages.statistics.trajectories import Trajectories


class Forgetting(Scorer):
    """Number of visits at which the mean loss rose by more than `rise` nats a token; more is better."""

    reads = frozenset({"example_losses"})

    rise: float = Field(0.05, ge=0, description="Nats a token that a loss must rise to count as forgotten.")

    def prepare(self, given: Given) -> Trajectories:
        """Read the losses that training logged."""
        return Trajectories(given.example_losses)

    def score(self, block: Block, state: Trajectories) -> np.ndarray:
        """Return score_B; NaN with fewer than two visits."""
        score_B = np.full(len(block.example_ids), np.nan)
        for index, example_id in enumerate(block.example_ids):
            loss_V = state.of(example_id)
            if len(loss_V) > 1:
                score_B[index] = np.count_nonzero(np.diff(loss_V.astype(np.float64)) > self.rise)
            else:
                block.refuse(index, "too_few_visits", f"training visited it {len(loss_V)} times, of 2 that are needed")
        return score_B
