"""The family of noise filters: rows whose answer looks wrong are kept from every selector, listed, and never chosen.

A filter gives each row a suspicion; this module compares rows with those of their own source, cuts, and says what fell.
A row about which the filter knows nothing is kept. Torch-free. Shapes: N pool rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from data_contracts.errors import ConfigError, MethodError
from data_contracts.method import Method
from stages.select.features import Features
from stages.statistics.trajectories import Trajectories
from stages.statistics.two_components import upper_of_two

LEAST_OF_A_SOURCE = 8
"""A source with fewer rows has no median to speak of; its rows are compared with the whole pool's."""
LARGEST_SPLIT = 0.5
"""A split that would drop more of the known rows is no group of wrong rows: then nothing is dropped, and said."""


@dataclass(frozen=True)
class Evidence:
    """What is known of the pool's rows, in the pool's order.

    Attributes:
        tokens: the pool, contract `tokens`, mapped.
        score_N: float32, NaN where a row has no valid score; None where there are no scores.
        loss_N: float32 mean loss of an answer token, nats, NaN where not known; None where there are no scores.
        others: score_N of further scorings of the same pool.
        visits: the losses that training met; None where no training is known.
        features: those of the rows that have one; None where scoring left none.
    """

    tokens: pa.Table
    score_N: np.ndarray | None = None
    loss_N: np.ndarray | None = None
    others: Sequence[np.ndarray] = ()
    visits: Trajectories | None = None
    features: Features | None = None


@dataclass(frozen=True)
class Sifted:
    """Who sifted, row numbers kept and dropped, ascending, each row's suspicion as compared, and how many have one."""

    method: NoiseFilter
    kept_K: np.ndarray
    dropped_D: np.ndarray
    suspicion_N: np.ndarray
    known: int


class NoiseFilter(Method):
    """One way of suspecting rows."""

    family: ClassVar[str] = "noise_filters"
    home: ClassVar[str] = "stages.select.noise_filters"

    needs_scores: ClassVar[bool] = False
    """Whether it cannot work without scores, or what scoring leaves."""
    limit: ClassVar[float | None] = None
    """The suspicion above which a row is dropped where `drop` is unset; None: the upper of two groups is."""

    drop: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the rows with a suspicion that is dropped, the most suspicious first; unset goes by the "
        "filter's own limit, or drops the upper of two groups.",
    )
    within: Literal["pool", "source"] = Field(
        "pool",
        description="Whether a row is compared with all rows, or with those of its source, so that no source is "
        "dropped for being hard.",
    )

    def suspicion(self, evidence: Evidence) -> np.ndarray:
        """Return suspicion_N float64, larger for what looks wrong, NaN where nothing is known.

        Raises `ConfigError` where the evidence that the filter goes by was not given.
        """
        raise TypeError(f"{type(self).__name__} defines no suspicion")

    def sift(self, evidence: Evidence) -> Sifted:
        """Return which rows are kept. Raises `MethodError` where a suspicion is infinite or not one a row."""
        found_N = np.asarray(self.suspicion(evidence), dtype=np.float64)
        if len(found_N) != evidence.tokens.num_rows or np.isinf(found_N).any():
            raise MethodError(
                f"noise filter {self.name()} gives each row a number or NaN",
                f"{len(found_N)} for {evidence.tokens.num_rows} rows, or one is infinite",
                "return one a row",
            )
        if self.within == "source":
            found_N = compared(found_N, evidence.tokens.column("source"))
        known = np.flatnonzero(np.isfinite(found_N))
        dropped = known[self._suspect(found_N[known])]
        kept = np.setdiff1d(np.arange(len(found_N)), dropped, assume_unique=True)
        return Sifted(self, kept, dropped, found_N, len(known))

    def _suspect(self, value_K: np.ndarray) -> np.ndarray:
        """Return which of these finite suspicions are too large."""
        if self.drop is not None:
            suspect_K = np.zeros(len(value_K), dtype=bool)
            suspect_K[np.argsort(-value_K, kind="stable")[: int(self.drop * len(value_K) + 0.5)]] = True
            return suspect_K
        if self.limit is not None and self.within == "pool":
            return np.asarray(value_K > self.limit)
        upper_K = upper_of_two(value_K)
        if upper_K is None or upper_K.mean() > LARGEST_SPLIT:
            return np.zeros(len(value_K), dtype=bool)
        return upper_K

    def lacking(self, what: str, remedy: str) -> ConfigError:
        """Return the error for evidence that was not given."""
        return ConfigError(f"noise filter {self.name()} is given {what}", "there is none", remedy)


def compared(value_N: np.ndarray, sources: pa.ChunkedArray) -> np.ndarray:
    """Return how many robust deviations each number stands above its source's median.

    The deviation is 1.4826 times the median distance from the median (Hampel 1974: for normal numbers the standard
    deviation). A source with few known numbers, or whose numbers are mostly equal, is measured with the pool's.
    """
    codes_N = sources.combine_chunks().dictionary_encode().indices.to_numpy()
    found_N = np.full(len(value_N), np.nan)
    known_N = np.isfinite(value_N)
    middle, width = _middle(value_N[known_N])
    order = np.argsort(codes_N, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(codes_N[order])) + 1):
        mine = rows[known_N[rows]]
        own_middle, own_width = _middle(value_N[mine]) if len(mine) >= LEAST_OF_A_SOURCE else (middle, width)
        found_N[mine] = (value_N[mine] - own_middle) / (own_width or width or 1.0)
    return found_N


def _middle(values: np.ndarray) -> tuple[float, float]:
    if not len(values):
        return 0.0, 0.0
    median = float(np.median(values))
    return median, 1.4826 * float(np.median(np.abs(values - median)))
