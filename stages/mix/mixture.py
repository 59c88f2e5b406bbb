"""The family of mixtures: from what is known of the pool's parts to the share of the selection that each gets.

A part is a source of the pool. A mixture sees numbers by part and asks for what it `reads`; how a part's share is then
filled is the selector's business. Torch-free: short trainings are made by the laboratory it is given. Shapes: P parts,
N pool rows, V visits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from data_contracts.method import Method
from data_contracts.records import Table
from stages.mix.visits import Visited

if TYPE_CHECKING:
    from stages.mix.lab import Lab


@dataclass(frozen=True)
class Given:
    """What a mixture is made from.

    Attributes:
        parts: the pool's sources, sorted.
        part_N: int32 place in `parts` of each pool row.
        rows_P, tokens_P, answers_P: int64 rows, tokens, and answer tokens that are predicted, of each part.
        unit: what a share is of: the selection's rows, or its tokens.
        share_P: of each part in the mixture before this one; in the prior where there was none.
        state_P: what that mixture's method carried over; NaN where there was none.
        visited: one a segment trained since then, oldest first.
        feature_PK: float64 mean feature of each part; None where scoring left none or the mixture does not read them.
        score_P: float64 mean score of each part, NaN where it has none; None likewise.
        rng: depends on the configured seed alone.
        notice: tells the user something once.
        lab: opens the laboratory for short trainings. Raises `ConfigError` where there is no model.
    """

    parts: tuple[str, ...]
    part_N: np.ndarray
    rows_P: np.ndarray
    tokens_P: np.ndarray
    answers_P: np.ndarray
    unit: Literal["rows", "tokens"]
    share_P: np.ndarray
    state_P: np.ndarray
    visited: Sequence[Visited]
    feature_PK: np.ndarray | None
    score_P: np.ndarray | None
    rng: np.random.Generator
    notice: Callable[[str], None]
    lab: Callable[[], Lab]

    @property
    def units(self) -> np.ndarray:
        """Rows or tokens of each part, by `unit`; shape (P,)."""
        return self.rows_P if self.unit == "rows" else self.tokens_P

    @property
    def prior(self) -> np.ndarray:
        """Each part's share of the pool; shape (P,)."""
        return np.asarray(self.units / self.units.sum())

    @property
    def answers_a_unit(self) -> np.ndarray:
        """Answer tokens a unit of each part, (P,): turns shares of units into shares of what a loss is made of."""
        return np.asarray(np.maximum(self.answers_P, 1) / self.units)


@dataclass(frozen=True)
class Mixed:
    """A mixture.

    Attributes:
        share_P: at least 0, summing to 1.
        phase_P: int32 phase in which each part is introduced; all in the first where None.
        replay: rows of earlier phases trained on again, for one row of a part of a later phase.
        state_P: carried to the next mixture of this method.
        facts, tables: what to say about it.
    """

    share_P: np.ndarray
    phase_P: np.ndarray | None = None
    replay: float = 0.0
    state_P: np.ndarray | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()


class Mixture(Method):
    """One way of sharing a selection out to the parts of the pool."""

    family: ClassVar[str] = "mixtures"
    home: ClassVar[str] = "stages.mix.methods"
    reads: ClassVar[frozenset[Literal["features", "scores", "example_losses", "model"]]] = frozenset()
    """What it cannot do without besides the pool."""

    def mix(self, given: Given) -> Mixed:
        """Return the mixture."""
        raise TypeError(f"{type(self).__name__} defines no mix")


def normalised(weight_P: np.ndarray) -> np.ndarray:
    """Return weights (at least 0, one above) scaled to a sum of 1."""
    return np.asarray(weight_P / weight_P.sum(), dtype=np.float64)
