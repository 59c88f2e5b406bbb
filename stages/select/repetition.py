"""Few rows often, or many rows once: how many rows of a ranking, and how often each, for a budget of tokens.

Every prefix of the selector's order is a candidate: its k rows fill the budget B in e = B / U(k) passes. What it is
worth is the mean gain of its rows times the effective tokens D'(U(k), e) that a law of repetition (a method) counts;
the best is taken, the more rows where two are equal. The whole curve is kept. Torch-free. K prefixes, S rows chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from data_contracts.errors import ConfigError
from data_contracts.method import Method
from data_contracts.records import Table
from data_contracts.tables import REPETITION
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice


class Repetition(Method):
    """How many rows of a ranking are trained on, and how often each."""

    family: ClassVar[str] = "repetitions"
    home: ClassVar[str] = "stages.select.repetitions"

    def repeat(self, pool: Candidates, quota: Quota, choice: Choice, passes: float) -> tuple[Choice, Curve | None]:
        """Return a prefix of `choice` with the visits of each row in a pass, and the curve it was taken from, if any.

        The tokens of all visits stay within those of `choice`, or of a quota that the pool does not fill. Raises
        `ConfigError` where lengths are not known.
        """
        raise TypeError(f"{type(self).__name__} defines no repeat")


class PrefixLaw(Repetition):
    """A law of what repeated tokens are worth, by which the best prefix of a ranking is taken."""

    most: float = Field(
        16.0, ge=1, description="Most visits of a row in one segment; past some 16 repeats add little (Muennighoff)."
    )

    def effective_tokens(self, unique_K: np.ndarray, epochs_K: np.ndarray) -> np.ndarray:
        """Return what `unique_K` tokens seen `epochs_K` times (at least once) are worth, in tokens seen once."""
        raise TypeError(f"{type(self).__name__} defines no effective_tokens")

    def repeat(self, pool: Candidates, quota: Quota, choice: Choice, passes: float) -> tuple[Choice, Curve]:
        """Return the best prefix of `choice` with the visits of each row, and the curve it was taken from.

        The tokens of all visits stay within those of `choice`, or of a quota that the pool does not fill; a first part
        of the rows is visited once more where they leave room. Raises `ConfigError` where lengths are not known.
        """
        unique_K = np.cumsum(lengths_of(pool, choice), dtype=np.int64)
        budget = tokens_of_visits(quota, choice, unique_K)
        curve = curve_of(self, unique_K, choice.gain, budget, passes)
        kept = curve.best + 1
        visits = float(curve.epochs_K[curve.best]) / passes
        repeats_K = visits_each(unique_K[:kept], visits, 0.5)  # tokens are whole, what is left of them is rounded
        return replace(choice.first(kept), repeats=repeats_K, short=""), curve


def visits_each(unique_K: np.ndarray, visits: float, rounded: float) -> np.ndarray:
    """Return whole visits of each row, int32 at least 1, that come to `visits` of all: a first part has one more.

    Args:
        unique_K: int64 cumulated tokens of the rows.
        rounded: tokens by which the part may be longer than its share.
    """
    whole = max(1, int(visits))
    repeats_K = np.full(len(unique_K), whole, dtype=np.int32)
    repeats_K[: int(np.searchsorted(unique_K, (visits - whole) * float(unique_K[-1]) + rounded, side="right"))] += 1
    return repeats_K


def lengths_of(pool: Candidates, choice: Choice) -> np.ndarray:
    """Return int tokens of each chosen row, in its order. Raises `ConfigError` where lengths are not known."""
    if pool.lengths_N is None:
        raise ConfigError("repetition needs each row's length", "there are only scores", "give `n_tokens` a row")
    found: np.ndarray = pool.lengths_N[choice.rows]
    return found


def tokens_of_visits(quota: Quota, choice: Choice, unique_K: np.ndarray) -> float:
    """Return the tokens that a pass may visit: those of `choice`, or of a quota that the pool does not fill.

    Args:
        unique_K: int64 cumulated tokens of `choice`.
    """
    if quota.tokens is not None:
        return float(quota.tokens)
    assert quota.rows is not None
    return float(unique_K[-1]) * max(1.0, quota.rows / len(choice.rows))


@dataclass(frozen=True)
class Curve:
    """One row a prefix of the ranking; `best` is the place of the one taken.

    Attributes:
        unique_K: int64 tokens of the prefix.
        epochs_K: visits of each of its rows in one segment.
        effective_K: tokens seen once that this is worth.
        quality_K: mean gain of the prefix; 1 where the selector has none.
    """

    unique_K: np.ndarray
    epochs_K: np.ndarray
    effective_K: np.ndarray
    quality_K: np.ndarray
    best: int

    @property
    def value(self) -> np.ndarray:
        """What each prefix is worth, shape (K,)."""
        return self.quality_K * self.effective_K

    def table(self, part: str) -> pa.Table:
        """Return the curve in the columns of its contract."""
        count = len(self.unique_K)
        columns = {
            "part": [part] * count,
            "rows": np.arange(1, count + 1),
            "unique_tokens": self.unique_K,
            "epochs": self.epochs_K,
            "effective_tokens": self.effective_K,
            "quality": self.quality_K,
            "value": self.value,
            "chosen": np.arange(count) == self.best,
        }
        schema = REPETITION.schema
        return pa.Table.from_arrays([pa.array(columns[n], schema.field(n).type) for n in schema.names], schema=schema)


SHOWN = 12
"""Points of a curve in the summary; all are in the artifact."""


def shown(curves: Mapping[str, Curve]) -> Table:
    """Return the curves for people: some points of each, at equal ratios of rows, and the one taken."""
    lines = []
    for part, curve in sorted(curves.items()):
        count = len(curve.unique_K)
        some = {round(count ** (number / (SHOWN - 1))) - 1 for number in range(SHOWN)} | {curve.best}
        for place in sorted(some):
            numbers = (curve.epochs_K, curve.effective_K, curve.quality_K, curve.value)
            found = (float(f"{values[place]:.6g}") for values in numbers)
            lines.append((part, place + 1, *found, "taken" if place == curve.best else ""))
    columns = ("part", "rows", "epochs", "effective tokens", "mean gain", "value", "")
    return Table(title="Few rows often or many once", columns=columns, rows=tuple(lines))


def curve_of(method: PrefixLaw, unique_K: np.ndarray, gain_K: np.ndarray | None, budget: float, passes: float) -> Curve:
    """Return the curve of a ranking.

    Args:
        method: the law.
        unique_K: int64 cumulated tokens of the ranking.
        gain_K: the rows' gains; None where all are alike.
        budget: tokens of one pass over the selection.
        passes: passes over the selection in a segment (`train.epochs`).

    A prefix too short to use the budget up in `most` visits of a row leaves the rest of it. Where no prefix has a mean
    gain above zero, repeating pays nowhere and the whole ranking is taken.
    """
    epochs_K = np.clip(passes * budget / unique_K, passes, max(method.most, passes))
    count_K = np.arange(1, len(unique_K) + 1)
    quality_K = np.ones(len(unique_K)) if gain_K is None else np.cumsum(gain_K, dtype=np.float64) / count_K
    effective_K = np.asarray(method.effective_tokens(unique_K.astype(np.float64), epochs_K), dtype=np.float64)
    value_K = quality_K * effective_K
    best = len(value_K) - 1 - int(np.argmax(value_K[::-1]))
    return Curve(unique_K, epochs_K, effective_K, quality_K, best if quality_K[best] > 0 else len(value_K) - 1)
