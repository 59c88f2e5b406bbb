"""ODM: what is least learnt is sampled more, by a bandit whose reward is the loss.

After each optimizer step, the reward of every part in its window is moved towards the part's loss over its share,
R̂ ← αR̂ + (1 − α) L/π; the mixture is Exp3's, π = (1 − Kε_t) softmax(ε_{t−1} R̂) + ε_t with ε_t = min(1/K, √(ln K / Kt)).
Source: Albalak et al. 2023 (arXiv 2312.02406), algorithm 1. There π changes at every step; here it acts from one
selection to the next, and the steps of a segment share the π they were selected by.
"""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from stages.mix.mixture import Given, Mixed, Mixture
from stages.mix.visits import mean_losses


class Odm(Mixture):
    """Online data mixing between rounds, from the losses of training's own visits."""

    reads = frozenset({"example_losses"})

    alpha: float = Field(0.9, ge=0, lt=1, description="Weight of the past in a part's running reward.")

    def mix(self, given: Given) -> Mixed:
        """Return Exp3's mixture after the last step; its `state` is the running reward."""
        parts = len(given.parts)
        reward_P = np.where(np.isnan(given.state_P), 0.0, given.state_P)
        last = 0
        for segment in given.visited:
            for step in np.unique(segment.step_V).tolist():
                own = segment.step_V == step
                loss_P = mean_losses(segment.part_V[own], segment.loss_V[own], segment.tokens_V[own], parts)
                seen = np.isfinite(loss_P) & (given.share_P > 0)
                gained_P = loss_P[seen] / given.share_P[seen]
                reward_P[seen] = self.alpha * reward_P[seen] + (1 - self.alpha) * gained_P
                last = max(last, int(step))
        share_P = exp3(reward_P, last + 1)
        return Mixed(share_P, state_P=reward_P, facts={"steps": last, "exploration": exploration(parts, last + 1)})


def exploration(parts: int, step: int) -> float:
    """Return ε of step 1, 2, …; 1/K at step 0."""
    return 1 / parts if step < 1 else min(1 / parts, math.sqrt(math.log(parts) / (parts * step)))


def exp3(reward_P: np.ndarray, step: int) -> np.ndarray:
    """Return π at `step` (from 1) for the rewards before it."""
    parts = len(reward_P)
    now = exploration(parts, step)
    exponent_P = exploration(parts, step - 1) * reward_P
    softmax_P = np.exp(exponent_P - exponent_P.max())
    return np.asarray((1 - parts * now) * softmax_P / softmax_P.sum() + now)
