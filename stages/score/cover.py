"""The family of coverages: which rows of the pool the scorer computes itself, and what the others are given.

A coverage asks the `Pool` for passes (some rows, one scorer) and returns one score a row. The engine keeps every pass
resumable, takes a computed row's columns from its pass, and marks in `exact` which rows the configured scorer computed.
A row that is not computed has a score all the same: it can be selected, and is never quarantined for being left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from data_contracts.errors import ConfigError
from data_contracts.method import Method

if TYPE_CHECKING:
    from stages.score.glance import Glance
    from stages.score.passes import ScorePass
    from stages.score.previous import Scoring
    from stages.score.scorer import Scorer


class Pool(Protocol):
    """What a coverage may ask for. Shapes: N rows of the pool, n rows of a pass, J columns of the scorer."""

    method: Scorer
    """The configured scorer."""
    lengths_N: np.ndarray
    answers_N: np.ndarray

    def notice(self, text: str) -> None:
        """Tell the user something once."""

    def __len__(self) -> int: ...

    def score(
        self, name: str, rows: np.ndarray | None = None, *, method: Scorer | None = None, glance: Glance | None = None
    ) -> ScorePass:
        """Score rows (ascending places; None: all) with the configured scorer, or another, and return the pass.

        With `glance` the rows are looked at in part, and none counts as computed. `name` is where its shards lie.
        """

    def previous(self) -> Iterator[Scoring]:
        """Yield the earlier rounds' scores brought to the pool's rows, newest first."""

    def glance(self, share: float) -> Glance:
        """Return the widest glance at no more than `share` of the pool's tokens."""

    def combined(self, group_nJ: np.ndarray) -> np.ndarray:
        """Return score_n float32 of the scorer's columns, as configured; NaN where a column is."""

    def rng(self, *names: str | int) -> np.random.Generator:
        """Return a generator of the configured seed and `names`."""


@dataclass(frozen=True)
class Covered:
    """One score a row, before the scorer's `finish`.

    Attributes:
        score_N: float32; NaN for a row that no pass could score: it is quarantined with its reason.
        predicted_NJ: float32 group columns of rows that are not computed, NaN where there are none.
        finished: whether the scores are final, so that the scorer's `finish` is not applied.
        facts: for the summary.
    """

    score_N: np.ndarray
    predicted_NJ: np.ndarray | None = None
    finished: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def refuse_unsampled(method: Scorer, coverage: str) -> None:
    """Raise `ConfigError` for a scorer of which a sample saves nothing, or says nothing of the rest."""
    if "model" not in method.reads:
        found = f"{method.name()} reads none"
    elif method.second_pass:
        found = f"{method.name()} scores a row by the features of all"
    else:
        return
    raise ConfigError(f"`score.coverage: {coverage}` computes a sample by a model, row by row", found, "use `full`")


class Coverage(Method):
    """One way of scoring a pool without computing every row."""

    family: ClassVar[str] = "coverages"
    home: ClassVar[str] = "stages.score.coverage"
    whole: ClassVar[bool] = False
    """Whether it always computes every row in one pass, so that rows of an earlier commit can be taken over."""

    def others(self) -> Iterable[Scorer]:
        """Return the scorers it uses beside the configured one."""
        return ()

    def check(self, method: Scorer) -> None:
        """Raise `ConfigError` or `MethodError` where its own scorers' settings, or it with `method`, are refused.

        Asked before anything is trained, and again before scoring.
        """
        self.others()

    def cover(self, pool: Pool) -> Covered:
        """Return the scores of the whole pool."""
        raise TypeError(f"{type(self).__name__} defines no cover")
