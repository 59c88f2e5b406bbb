"""GST: parts whose gradients agree are learnt together, and groups of them are introduced one after the other.

The affinity of two parts is (1 + cos)/2 of their mean gradient features; spectral clustering with the largest eigengap
makes groups. The group nearest the target comes first; each later one replays some rows of those before. Source: GST
(arXiv 2605.19101); how near a group is to the target is the mean score of its rows, which for `less` is the cosine to
the target's gradient and for `influence` the product with it. Shares are the pool's.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data_contracts.records import Table
from stages.mix.mixture import Given, Mixed, Mixture
from stages.statistics.spectral import spectral_groups


class Gst(Mixture):
    """Gradient-affinity groups as phases of an epoch."""

    reads = frozenset({"features", "scores"})

    groups: int | None = Field(None, ge=1, description="How many groups; unset takes the largest eigengap.")
    most: int = Field(8, ge=2, description="Most groups where the eigengap decides.")
    replay: float = Field(0.25, ge=0, le=4, description="Rows of earlier groups again, for one row of a later one.")

    def mix(self, given: Given) -> Mixed:
        """Return the pool's shares with a phase a group; a part without a feature is introduced last."""
        assert given.feature_PK is not None
        assert given.score_P is not None
        known = np.flatnonzero(np.isfinite(given.feature_PK).all(axis=1) & (given.feature_PK != 0).any(axis=1))
        label = spectral_groups(affinity(given.feature_PK[known]), groups=self.groups, most=self.most)
        groups = [known[label == group] for group in range(int(label.max()) + 1)]
        near = [_mean_score(given.score_P[group], given.rows_P[group]) for group in groups]
        place = np.argsort(np.argsort(-np.array(near), kind="stable"), kind="stable")
        phase_P = np.full(len(given.parts), len(near), dtype=np.int32)
        phase_P[known] = place[label]
        lines = []
        for phase, group in enumerate(np.argsort(place).tolist()):
            names = ", ".join(given.parts[part] for part in groups[group][:8])
            lines.append((phase, names, None if np.isinf(near[group]) else float(f"{near[group]:.6g}")))
        return Mixed(
            given.prior,
            phase_P,
            self.replay,
            facts={"groups": len(near), "parts_without_a_feature": len(given.parts) - len(known)},
            tables=(Table(title="Groups", columns=("phase", "parts", "mean score"), rows=tuple(lines)),),
        )


def _mean_score(score: np.ndarray, rows: np.ndarray) -> float:
    """Return the mean over a group's rows, of its parts that have scores; −∞ where none has."""
    scored = np.isfinite(score)
    return float(np.average(score[scored], weights=rows[scored])) if scored.any() else -np.inf


def affinity(feature_PK: np.ndarray) -> np.ndarray:
    """Return (1 + cos)/2 of each two rows."""
    unit_PK = feature_PK / np.linalg.norm(feature_PK, axis=1, keepdims=True)
    return np.asarray((1 + np.clip(unit_PK @ unit_PK.T, -1, 1)) / 2)
