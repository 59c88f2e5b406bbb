"""How far off are loss laws that are fitted to the beginning of a run, or to the small runs of a table?

Own runs (`real_curves.csv`): each law, and the curve bank, is fitted to the validation losses of the first 30, 50 or
70 % of a run's FLOPs and asked for the last one. Laws read the run's tokens, the different ones among them, its steps
and the mean tokens of one, and the model's parameters; one tokenizer tells `compression` nothing. No law can rise, so
`falling` runs, whose last loss is the lowest of the run or within 0.05 nats of it, stand apart from those that
over-fit.

    python -m benchmarks.laws [--table FILE]

`--table`: a CSV with the columns `parameters`, `tokens`, `loss` and, for `muennighoff`, `unique`. Each law is fitted to
the four fifths of the runs with the least compute (6 N D) and asked for the others.

Figures: median and largest absolute error, nats, and the share of losses inside the 80 % interval. `last` is the last
loss seen, or the nearest run of the table in compute.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.chain import report
from benchmarks.real_curves import WINDOW
from benchmarks.recorded import Recorded
from data_contracts.method import resolve
from stages.governor.curve_bank import fit_curve
from stages.governor.law import LossModel, history
from stages.governor.law_report import by_compute, read_runs
from stages.governor.state import State

LAWS = ("kaplan", "chinchilla", "muennighoff", "noisy_quadratic")
SHARES, LEVEL, NEAR = (0.3, 0.5, 0.7), 0.8, 0.05
RESAMPLES = {"noisy_quadratic": 10}
"""Of the bootstrap, 40 but for a law whose descents take a tenth of a second and more."""
PARAMETERS = {"stories260k": 260_032, "scratch": 443_232}
Told = tuple[float, bool | None]
"""Error in nats; whether the interval held the loss, None where there is none."""


def law_of(name: str) -> LossModel:
    """Return a law with its published constants."""
    return resolve(LossModel, {"method": name}, "law")


def foretold(curve: Recorded, share: float) -> dict[str, Told]:
    """Return what each way says of a run's last validation loss from the first `share` of its FLOPs."""
    seen = [row for row, spent in zip(curve.rows, curve.spent_share, strict=True) if row["step"] > 0 and spent <= share]
    last, state = curve.rows[-1], State.from_rows([seen])
    model, _, rows, *_ = curve.name.split("/")
    once = curve.rows[-1]["tokens"] * min(1.0, int(rows) / (curve.rows[-1]["step"] * WINDOW))
    table = history(state, PARAMETERS[model], once)
    ahead = {"parameters": [PARAMETERS[model]], "tokens": [last["tokens"]], "unique": [once]}
    ahead |= {"batch": [table["batch"][0]], "steps": [last["step"]]}
    loss, found = last["validation_loss"], dict[str, Told]()
    for name in LAWS:
        fitted = law_of(name).fit(table, np.random.default_rng(0), resamples=RESAMPLES.get(name, 40))
        told = fitted.forecast(ahead, LEVEL)
        found[name] = (float(told.loss_R[0]) - loss, bool(told.low_R[0] <= loss <= told.high_R[0]))
    bank = fit_curve([row["flops"] for row in seen], table["loss"], np.random.default_rng(0))
    assert bank is not None
    low, middle, high = np.quantile(bank.loss(last["flops"]), [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2])
    found["curve bank"] = (float(middle) - loss, bool(low <= loss <= high))
    found["last"] = (seen[-1]["validation_loss"] - loss, None)
    return found


def own_runs() -> dict[str, list[Told]]:
    """Return the errors on own runs by "group share way"."""
    found: dict[str, list[Told]] = defaultdict(list)
    for curve in Recorded.all():
        losses = [row["validation_loss"] for row in curve.rows]
        group = "falling" if losses[-1] <= min(losses) + NEAR else "over-fit"
        for share in SHARES:
            for way, told in foretold(curve, share).items():
                found[f"{group} {share:.0%} {way}"].append(told)
    return found


def of_table(path: Path) -> dict[str, list[Told]]:
    """Return the errors on the dearest fifth of a table's runs by way."""
    columns = read_runs(path)
    small, large = by_compute(columns)
    found: dict[str, list[Told]] = {}
    for name in LAWS:
        law = law_of(name)
        if not set(law.reads) <= set(columns):
            continue
        told = law.fit(small, np.random.default_rng(0), resamples=RESAMPLES.get(name, 40)).forecast(large, LEVEL)
        inside = (told.low_R <= large["loss"]) & (large["loss"] <= told.high_R)
        found[name] = list(zip((told.loss_R - large["loss"]).tolist(), inside.tolist(), strict=True))
    found["last"] = [(float(small["loss"][-1] - loss), None) for loss in large["loss"]]
    return found


def main() -> None:
    """Print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=None, help="runs of others instead of own ones")
    given = parser.parse_args()
    found = own_runs() if given.table is None else of_table(given.table)
    shown, figures = Table("", "runs", "median error", "largest", "inside 80 %"), dict[str, Any]()
    for key, told in found.items():
        size, inside = np.abs([error for error, _ in told]), [held for _, held in told if held is not None]
        middle, most = round(float(np.median(size)), 4), round(float(size.max()), 4)
        covered = round(float(np.mean(inside)), 2) if inside else None
        figures[key] = [len(told), middle, most, covered]
        shown.add_row(key, str(len(told)), f"{middle:.4f}", f"{most:.4f}", "" if covered is None else f"{covered:.2f}")
    Console(width=110).print(shown)
    report("laws", figures)


if __name__ == "__main__":
    main()
