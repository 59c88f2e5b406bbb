"""The family of loss laws: what loss a run of given size and data reaches, with the doubt about it.

A law is one formula and its constants; the defaults of its fields are the published ones. `fit` finds the constants of
a table of runs, or of one run's own history (`history`), by the robust method of `law_fit.py`, and returns the fitted
law with a bootstrap around it. What a table cannot tell (the worth of parameters, where all runs have equally many)
keeps the value that the law had before. Shapes: R runs, B bootstrap resamples. Losses are nats a token unless a law
says otherwise. Whether a forecast is worth acting on is a policy's judgement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy.optimize import minimize_scalar

from data_contracts.errors import InputError
from data_contracts.method import Method
from stages.governor.law_fit import bootstrap, minimise
from stages.governor.state import State

Columns = Mapping[str, np.ndarray]
FLOPS_PER_PARAMETER_TOKEN = 6
"""Forward and backward pass: C = 6 N D (Kaplan et al. 2020, section 2.1)."""
MOST_UNTOLD = 0.5
"""Of the lowest loss seen: the most that a term which the runs do not tell may take."""


class LossModel(Method):
    """L(columns); the fields are its constants. Those named `log_…` may be any number, the others are positive."""

    family: ClassVar[str] = "laws"
    home: ClassVar[str] = "stages.governor.laws"
    reads: ClassVar[tuple[str, ...]] = ()
    """Columns of a run table, each positive: parameters, tokens, unique, batch, steps, flops, compression."""
    told_by: ClassVar[Mapping[str, str]] = {}
    """Constants that only a table with several values of this column tells; the others are told by any table."""
    height: ClassVar[str | None] = None
    """The constant that sets the size of `by_parameters`, the term of what a run's parameters alone leave."""
    without_embeddings: ClassVar[bool] = False
    """Whether its parameters leave out embedding and head."""
    splits: ClassVar[tuple[str, ...]] = ("parameters", "tokens")
    """What `optimal` divides FLOPs into."""
    starts: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    """Grid that the fit starts from, beside the law's own constants; a constant left out starts at its own."""

    @classmethod
    def formula(cls, constants: Mapping[str, Any], runs: Columns) -> Any:
        """Return the loss; constants may be complex (derivatives are taken by complex steps)."""
        raise TypeError(f"{cls.__name__} defines no formula")

    @classmethod
    def by_parameters(cls, constants: Mapping[str, Any], runs: Columns) -> Any:
        """Return what the parameters leave of the loss, were data no limit, (R,)."""
        raise TypeError(f"{cls.__name__} has no term of the parameters")

    def predict(self, runs: Mapping[str, Any]) -> np.ndarray:
        """Return the loss of each run, shape (R,). Raises `InputError` for a column that is absent or not positive."""
        return np.asarray(self.formula(self.constants(), read_columns(runs, self.reads)), dtype=np.float64)

    def constants(self) -> dict[str, float]:
        """Return the fields as numbers."""
        return {name: float(value) for name, value in self.model_dump().items()}

    def free(self, runs: Columns) -> tuple[str, ...]:
        """Return the constants that `runs` can tell."""
        varied = {name for name in self.reads if np.ptp(runs[name]) > 1e-9 * np.max(runs[name])}
        return tuple(name for name in self.constants() if self.told_by.get(name) in {None, *varied})

    def fit(self, table: Mapping[str, Any], rng: np.random.Generator, *, resamples: int = 200) -> FittedLaw:
        """Return the law fitted to a table of runs.

        Args:
            table: the columns that the law reads and `loss`, each (R,), positive; others are ignored.
            rng: of the bootstrap.
            resamples: B, of rows with replacement.

        Raises `InputError` for a column that is absent or not positive, and for fewer runs than constants plus one.
        """
        runs = read_columns(table, (*self.reads, "loss"))
        free = self.free(runs)
        if len(runs["loss"]) <= len(free):
            raise InputError(
                f"more runs than constants to fit ({', '.join(free)})",
                f"{len(runs['loss'])} run(s) for {len(free)} constants",
                "give more runs, or a law with fewer constants",
            )
        fitted = minimise(self.formula, self._kept(runs, free), free, self.starts, runs)
        draws = bootstrap(self.formula, fitted, free, runs, resamples, rng)
        law = type(self)(**fitted)
        return FittedLaw(law, free, draws, np.log(runs["loss"]) - np.log(law.predict(runs)))

    def _kept(self, runs: Columns, free: Sequence[str]) -> dict[str, float]:
        """Return the constants to fit from. Where the runs do not tell the term of the parameters and it alone would be
        more than `MOST_UNTOLD` of the lowest loss, as with a small model on easy text, it is lowered to that: its sum
        with the other terms is what they tell."""
        constants = self.constants()
        height = self.height
        if height is None or height in free:
            return constants
        most = float(np.log(MOST_UNTOLD * runs["loss"].min()))
        above, higher = (
            float(np.log(np.max(self.by_parameters({**constants, height: constants[height] + more}, runs))))
            for more in (0.0, 1.0)
        )
        constants[height] -= max(0.0, above - most) / (
            higher - above
        )  # the term is a power of the height's exponential
        return constants

    def optimal(self, flops: float, **given: float) -> tuple[float, ...]:
        """Return the `splits` with the lowest loss for `flops`; here (parameters, tokens) with 6 N D = `flops`.

        By a bounded search over ln N; a law with a closed form, or another split, overrides it. `given` are the law's
        other columns.
        """
        product = flops / FLOPS_PER_PARAMETER_TOKEN

        def loss(log_n: float) -> float:
            n = np.exp(log_n)
            run = {"parameters": [n], "tokens": [product / n], **{name: [value] for name, value in given.items()}}
            return float(self.predict(run)[0])

        grid = np.linspace(0.0, np.log(product), 200)
        best = int(np.argmin([loss(x) for x in grid]))
        around = (grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)])
        found = minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 1e-10})
        return float(np.exp(found.x)), product / float(np.exp(found.x))


@dataclass(frozen=True)
class Forecast:
    """Expected loss of each run and the interval a new run of that kind falls into, each (R,)."""

    loss_R: np.ndarray
    low_R: np.ndarray
    high_R: np.ndarray


@dataclass(frozen=True)
class FittedLaw:
    """A law with fitted constants.

    Args:
        law: at the optimum.
        free: the constants that were fitted; the others kept their value.
        draws: constant → (B,) values, one a bootstrap resample.
        residual_R: log loss seen less log loss fitted.
    """

    law: LossModel
    free: tuple[str, ...]
    draws: Mapping[str, np.ndarray]
    residual_R: np.ndarray

    def interval(self, constant: str, level: float = 0.8) -> tuple[float, float]:
        """Return the bootstrap percentile interval of a constant."""
        low, high = np.quantile(self.draws[constant], [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def forecast(self, runs: Mapping[str, Any], level: float = 0.8, seed: int = 0) -> Forecast:
        """Return the loss expected of `runs` and its interval: doubt about the constants and the spread of runs.

        Each resample's law is multiplied by exp of a residual drawn from the fit's, inflated by √(R/(R−P)) for the P
        constants that they were fitted with.
        """
        columns = read_columns(runs, self.law.reads)
        constants = {name: values[:, None] for name, values in self.draws.items()}
        with np.errstate(all="ignore"):  # a resample's constants may have gone to their ends
            drawn_BR = np.asarray(self.law.formula(constants, columns), dtype=np.float64)
        count = len(self.residual_R)
        inflated = self.residual_R * np.sqrt(count / max(1, count - len(self.free)))
        drawn_BR = drawn_BR * np.exp(np.random.default_rng(seed).choice(inflated, size=drawn_BR.shape))
        low_R, high_R = np.quantile(drawn_BR, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return Forecast(self.law.predict(runs), low_R, high_R)

    def score(self, table: Mapping[str, Any], level: float = 0.8) -> tuple[float, float]:
        """Return (mean absolute error, share of losses inside the interval) on runs that were held out."""
        seen_R = read_columns(table, ("loss",))["loss"]
        told = self.forecast(table, level)
        inside_R = (told.low_R <= seen_R) & (seen_R <= told.high_R)
        return float(np.abs(told.loss_R - seen_R).mean()), float(inside_R.mean())


def read_columns(table: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the `wanted` columns as float64, all of one length. Raises `InputError` where one is not positive."""
    absent = [name for name in wanted if name not in table]
    if absent:
        raise InputError(
            f"a table with the columns {', '.join(wanted)}", f"no column {', '.join(absent)}", "add the column"
        )
    columns = {name: np.atleast_1d(np.asarray(table[name], dtype=np.float64)) for name in wanted}
    lengths = {name: column.shape for name, column in columns.items()}
    if len(set(lengths.values())) != 1 or not next(iter(lengths.values()))[0]:
        raise InputError("columns of one length, at least 1", f"{lengths}", "give one number a run in each column")
    for name, column in columns.items():
        if not (np.isfinite(column) & (column > 0)).all():
            row = int(np.argmin(np.isfinite(column) & (column > 0)))
            raise InputError("finite numbers above 0", f"{name} is {column[row]} in row {row}", "drop the row")
    return columns


def history(state: State, parameters: float, unique: float | None = None) -> dict[str, np.ndarray]:
    """Return a run's own evaluations as a table for `fit`: one row an evaluation of the loss, with tokens and steps so
    far, and as the batch the mean tokens of a step.

    Args:
        state: of the run; evaluations before the first token are left out.
        parameters: of the model, without embeddings where the law wants it so.
        unique: different tokens in the data, where the law reads them; each row has at most its own tokens.
    """
    seen = [point for point in state.evaluations if min(point.tokens, point.flops, point.step, point.loss or 0.0) > 0]
    tokens_R, step_R = (np.array([float(value) for value in column]) for column in (
        [point.tokens for point in seen], [point.step for point in seen]
    ))  # fmt: skip
    table = {
        "parameters": np.full(len(seen), float(parameters)),
        "tokens": tokens_R,
        "steps": step_R,
        "batch": np.full(len(seen), tokens_R[-1] / step_R[-1] if seen else 1.0),
        "flops": np.array([float(point.flops) for point in seen]),
        "loss": np.array([float(point.loss or 0.0) for point in seen]),
    }
    return table if unique is None else {**table, "unique": np.minimum(tokens_R, unique)}
