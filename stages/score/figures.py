"""Pictures of a scoring: how scores lie, and score against length and loss, as one PNG beside the table.

A bounded number of rows is drawn (`stages/page/points.py`). The file is measured: it is outside the digest of
what it shows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stages.page.points import BLUE, drawn
from stages.score.checkups import Scored

BINS = 60
FILE = "scores.png"


def draw(path: Path, scored: Scored, title: str) -> None:
    """Write the picture to `path`; a number that no row has is not drawn against."""
    from matplotlib.figure import Figure

    others = [("tokens", scored.tokens_N), ("mean loss of an answer token, nats", scored.loss_N)]
    others = [(name, values_N) for name, values_N in others if np.isfinite(values_N).any()]
    figure = Figure(figsize=(4.2 * (1 + len(others)), 3.4), dpi=110, layout="constrained")
    axes = figure.subplots(1, 1 + len(others), squeeze=False)[0]
    known_N = scored.score_N[np.isfinite(scored.score_N)].astype(np.float64)
    low, high = float(known_N.min(initial=np.inf)), float(known_N.max(initial=-np.inf))
    if high - low > BINS * np.spacing(max(abs(low), abs(high), 1e-300)):
        axes[0].hist(known_N, bins=BINS, color=BLUE)
    else:  # all alike: too narrow to be cut into bins
        axes[0].bar([f"{low:g}"], [len(known_N)], color=BLUE)
    axes[0].set(xlabel="score", ylabel="rows", title=title)
    for axis, (name, values_N) in zip(axes[1:], others, strict=True):
        rows = drawn(scored.score_N, values_N)
        axis.scatter(values_N[rows], scored.score_N[rows], s=5, alpha=0.4, color=BLUE, linewidths=0)
        axis.set(xlabel=name, ylabel="score", title=f"{len(rows)} rows")
    figure.savefig(path, format="png")
