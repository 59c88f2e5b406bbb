"""Trajectory: rows whose loss stays high, or rises again, while training goes on.

What generalises is learned early and kept; a wrong answer stays surprising until it is learned by heart, and is lost
again. Free: training logs the loss of every visit (`example_losses`). A row that training did not visit is kept: the
filter knows what the run, or a small model trained over the whole pool, has been through.
Source: Swayamdipta et al. 2020 (dataset cartography: mean over the visits), whose confidence is a probability.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from stages.select.noise import Evidence, NoiseFilter


class Trajectory(NoiseFilter):
    """Mean over a row's visits of its mean answer-token loss, or the loss's rise from its lowest visit to the last."""

    by: Literal["mean", "rise"] = Field("mean", description="Loss that stays high, or that rises again, nats.")
    least_visits: int = Field(2, ge=1, description="Rows with fewer visits are kept.")

    def suspicion(self, evidence: Evidence) -> np.ndarray:
        """Return suspicion_N; NaN with too few visits. Raises `ConfigError` where no training is known."""
        if evidence.visits is None:
            raise self.lacking("the losses of training", "give `example_losses`, or use `answer_fit`")
        found_N = np.full(evidence.tokens.num_rows, np.nan)
        row = 0
        for chunk in evidence.tokens.column("example_id").chunks:
            for example_id in chunk:
                loss_V = evidence.visits.of(example_id.as_py()).astype(np.float64)
                if len(loss_V) >= self.least_visits:
                    found_N[row] = loss_V.mean() if self.by == "mean" else loss_V[-1] - loss_V.min()
                row += 1
        return found_N
