"""What a user should look at before trusting scores: what explains them, whether others agree, which rows are suspect.

Rank correlations with length and loss say whether a cheaper number would have done; those with earlier scores, whether
the ranking holds. The noise audit lists rows whose answer may be wrong: by self-influence where the method's score is
one (the norm of the row's own gradient), by the model's loss otherwise. Everything is a function of the tables;
pictures are `figures.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from data_contracts.records import Table
from stages.page.points import spread
from stages.score.scorer import Scorer
from stages.statistics.rank import spearman

SUSPECTS = 10
MOST_RANKED = 50_000
"""Rows of a rank correlation, at equal steps through the pool (its standard error is then below 0.005): ranking holds
some 80 bytes a row."""


@dataclass(frozen=True)
class Scored:
    """A scored pool, NaN where a number is not known: score, mean answer-token loss (nats), tokens, answer tokens."""

    score_N: np.ndarray
    loss_N: np.ndarray
    tokens_N: np.ndarray
    answer_tokens_N: np.ndarray


@dataclass(frozen=True)
class Agreement:
    """The rank correlation of the score with another number, and over how many rows; None where one is constant."""

    name: str
    rows: int
    spearman: float | None


def agreements(scored: Scored, earlier: Iterable[tuple[str, np.ndarray]]) -> list[Agreement]:
    """Return the score's rank correlation with length, answer length, loss and each of `earlier` (name, score_N).

    Over the rows that have both numbers, at most `MOST_RANKED` of them.
    """
    numbers = [
        ("tokens", scored.tokens_N),
        ("answer tokens", scored.answer_tokens_N),
        ("loss", scored.loss_N),
        *earlier,
    ]
    found = []
    for name, other_N in numbers:
        both = spread(np.flatnonzero(np.isfinite(scored.score_N) & np.isfinite(other_N)), MOST_RANKED)
        if len(both):
            value = spearman(scored.score_N[both], other_N[both])
            found.append(Agreement(name, len(both), None if value is None else round(value, 4)))
    return found


def agreement_table(found: list[Agreement]) -> Table:
    """Return the correlations as a table."""
    rows = tuple((item.name, item.spearman, item.rows) for item in found)
    return Table(title="Rank correlation of the score", columns=("with", "Spearman", "rows"), rows=rows)


def suspects(
    method: Scorer, scored: Scored, example_id: Callable[[int], str], text: Callable[[str], str]
) -> Table | None:
    """Return the rows whose answers look most wrong, ties in the pool's order; None where nothing tells.

    Args:
        example_id: of a row number.
        text: of an example_id, shortened.
    """
    own_N = method.suspicion(scored.score_N)
    name, value_N = ("self-influence", own_N) if own_N is not None else ("loss", scored.loss_N)
    known = np.flatnonzero(np.isfinite(value_N))
    if not len(known):
        return None
    order = known[np.argsort(-value_N[known].astype(np.float64), kind="stable")][:SUSPECTS]
    rows = []
    for row in order.tolist():
        loss, score = (_shown(column_N[row]) for column_N in (scored.loss_N, scored.score_N))
        rows.append((_shown(value_N[row]), loss, score, example_id(row), text(example_id(row))))
    return Table(
        title=f"Noise audit: largest {name}",
        columns=(name, "mean loss", "score", "example_id", "text"),
        rows=tuple(rows),
    )


def _shown(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None
