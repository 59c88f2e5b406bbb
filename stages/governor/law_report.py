"""What a law says of a table of runs: its constants, how far off it is on runs it has not seen, what more compute buys.

A law is fitted to all runs, with a bootstrap, for its constants and for what it expects; and once more to the four
fifths of least compute, to be asked for the others: the error that counts, as a forecast is always of a larger run.
Reads CSV; an error names the file, the line and the column. Which laws there are is the family's business.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pydantic import Field

from data_contracts.cost import Frozen
from data_contracts.errors import InputError
from data_contracts.method import find, names
from stages.governor.law import FLOPS_PER_PARAMETER_TOKEN, Columns, LossModel

LEVEL, RESAMPLES = 0.8, 200


class Constant(Frozen):
    """A constant of a law; the interval is None where the runs do not tell it and it kept the law's own value."""

    name: str
    value: float
    low: float | None
    high: float | None


class HeldOut(Frozen):
    """How the law, fitted to the runs of least compute, did on the others."""

    runs: int
    error: float = Field(description="Mean absolute error, in the loss's unit.")
    coverage: float = Field(description="Share of losses inside the interval.")


class Expected(Frozen):
    """What a law expects at a compute, split in the best way or as asked."""

    flops: float
    split: dict[str, float]
    loss: float
    low: float
    high: float


class LawReport(Frozen):
    """One law on one table."""

    law: str
    runs: int
    constants: tuple[Constant, ...]
    held_out: HeldOut | None
    why_not: str = Field("", description="Why nothing was held out.")
    expected: Expected | None = None
    optimal: dict[str, float] | None = Field(None, description="The best split of the compute asked for.")


def read_runs(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a CSV that a law can read, and `loss`; each (R,), above 0. Others are ignored.

    Raises `InputError` for a file without `loss` or without rows, and for a cell that is no number above 0.
    """
    known = {"loss", "flops", *(name for law in names(LossModel) for name in find(LossModel, law).reads)}
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines)
            columns = [name for name in reader.fieldnames or () if name in known]
            if "loss" not in columns:
                header = ", ".join(reader.fieldnames or ()) or "nothing"
                raise InputError(
                    "a CSV whose first line names the columns, `loss` among them",
                    f"{path.name} begins with {header}",
                    f"name them: {', '.join(sorted(known))}",
                )
            found: dict[str, list[float]] = {name: [] for name in columns}
            for row in reader:
                for name in columns:
                    found[name].append(_number(path, reader.line_num, name, row[name]))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("a readable CSV", f"{path}: {error}", "name another file") from error
    if not found["loss"]:
        raise InputError("at least one run", f"{path.name} has none below its first line", "write one run a line")
    return {name: np.array(values) for name, values in found.items()}


def _number(path: Path, line: int, column: str, cell: str | None) -> float:
    try:
        value = float(cell or "")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InputError(
            "a finite number above 0 in each cell",
            f"{path.name}, line {line}, column {column}: {'nothing' if not cell else repr(cell)}",
            "mend the cell or leave the run out",
        )
    return value


def compute_of(runs: Columns) -> np.ndarray:
    """Return each run's FLOPs, (R,): the column, else 6 N D, else 6 N B K. Raises `InputError` where none is told."""
    if "flops" in runs:
        return np.asarray(runs["flops"])
    for names_ in (("parameters", "tokens"), ("parameters", "batch", "steps")):
        if set(names_) <= set(runs):
            return np.asarray(FLOPS_PER_PARAMETER_TOKEN * np.prod([runs[name] for name in names_], axis=0))
    raise InputError(
        "runs whose compute is told", f"the columns are {', '.join(runs)}", "add `flops`, or parameters and tokens"
    )


def by_compute(runs: Columns) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the four fifths of the runs with the least compute, and the others."""
    order = np.argsort(compute_of(runs), kind="stable")
    at = len(order) * 4 // 5
    first, rest = ({name: values[part] for name, values in runs.items()} for part in (order[:at], order[at:]))
    return first, rest


def report(
    law: LossModel,
    runs: Columns,
    *,
    flops: float | None = None,
    given: Mapping[str, float] | None = None,
    unique: float | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> LawReport:
    """Fit `law` to `runs` and say what it tells.

    Args:
        law: where the fit starts, and what untold constants keep.
        runs: the columns it reads and `loss`, each (R,).
        flops: compute to expect a loss at; None asks for none.
        given: the columns of the run expected there; None: the best split of `flops`.
        unique: different tokens there, for a law that reads them; None: all are.
        resamples, seed: of the bootstraps.

    Raises `InputError` for an absent column and for too few runs.
    """
    fitted = law.fit(runs, np.random.default_rng(seed), resamples=resamples)
    constants = tuple(
        Constant(name=name, value=value, low=low, high=high)
        for name, value in fitted.law.constants().items()
        for low, high in (fitted.interval(name, LEVEL) if name in fitted.free else (None, None),)
    )
    expected, best = None, None
    if flops is not None:
        more = {"unique": unique} if "unique" in law.reads and unique is not None else {}
        best = _split(fitted.law, flops, more)
        run = {"flops": flops, **(best if given is None else given)}
        run = {"unique": run["tokens"], **run, **more} if "unique" in law.reads else run
        told = fitted.forecast({name: [run[name]] for name in law.reads}, LEVEL)
        expected = Expected(
            flops=flops,
            split={name: value for name, value in run.items() if name in {*law.reads, *law.splits} - {"flops"}},
            loss=float(told.loss_R[0]),
            low=float(told.low_R[0]),
            high=float(told.high_R[0]),
        )
    found: HeldOut | None = None
    why_not = ""
    try:
        first, rest = by_compute(runs)
        error, coverage = law.fit(first, np.random.default_rng(seed), resamples=resamples).score(rest, LEVEL)
        found = HeldOut(runs=len(rest["loss"]), error=error, coverage=coverage)
    except InputError as failed:
        why_not = failed.found
    return LawReport(
        law=law.name(), runs=len(runs["loss"]), constants=constants, held_out=found, why_not=why_not,
        expected=expected, optimal=best,
    )  # fmt: skip


def _split(law: LossModel, flops: float, more: Mapping[str, float]) -> dict[str, float]:
    """Return the best split of `flops`; where all tokens are different, of the law without a limit on them."""
    if "unique" in law.reads and not more:
        more = {"unique": flops}  # never fewer than the tokens
    return dict(zip(law.splits, law.optimal(flops, **more), strict=True))
