"""What a change of the target costs: steps and FLOPs until a run is as good for the new one as one that knew it.

A pool holds a planted share of two kinds of rows, the rest being neither. A run trains for the first kind; then target,
validation and holdout become the second kind's and the next run of the configuration, in the same store, has as much
again to spend:

- `dynamic`: it goes on from the best that was trained and chooses anew for the new target (`begin.start: latest`);
- `static`: it goes on from there too, on the rows chosen for the old target;
- `anew`: it begins at the base, for the new target (`begin.start: anew`).

Each is the pipeline's own loop under the default policy, everything it does charged. An arm has recovered once its
validation loss is as low as the lowest of another arm: of `anew`, which is what knowing the target from the base brings
for as much, and of `static`. That is told in FLOPs (as passes over the pool) and in optimizer steps from the change on,
the warm-up among them; as least, median and most over the cells; None is never.
`agreement_over_the_change` is the rank correlation of scores before and after the change, `agreement_of_rounds` that of
successive scorings for one target, as decisions have them. The holdout is read once, with the checkpoint that
validation prefers.

    python -m benchmarks.drift [--quick] [--seeds N ...] [--passes P] [--minutes M] [--work FOLDER]
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cells import (
    ARITHMETIC,
    Losses,
    Tasks,
    draw_categories,
    mean_loss,
    paired_interval,
    read,
    read_tasks,
    small_settings,
    write,
    write_planted,
)
from benchmarks.chain import report
from benchmarks.options import Options
from benchmarks.trials import Cell, Trial
from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.config import ARMS as NAMED
from data_contracts.config import Config
from data_contracts.records import Ref, Result
from flows.pipeline import trained

ROWS, SHARE, WARM_UP_ROWS, RATE = 240, 0.15, 16, 3e-3
SIDES = ("target", "validation", "holdout")
SIZES = {"pool": ROWS // 2, "target": 16, "validation": 24, "holdout": 80}
ARMS = ("dynamic", "static", "anew")
Curve = list[tuple[int, int, float]]
"""(FLOPs, steps, validation loss) of each evaluation, counted from the change on."""


class Run(Trial):
    """A run of its own in a cell's store; the selection `keeps`, where given, stands in for all that it would make."""

    def __init__(self, cell: Cell, config: Config, keeps: tuple[Ref, ...] = ()) -> None:
        run = cell.store.open_run(config.name, config.model_dump(mode="json"))
        super().__init__(cell.workspace(config), cell.store, run)
        self._keeps = keeps

    def call(self, verb: str, *, refresh: bool = False, **inputs: tuple[Ref, ...]) -> Result:
        """Make a call; where a selection is kept, nothing is scored and it is what selecting gives."""
        if not self._keeps or verb not in ("score", "select"):
            return super().call(verb, refresh=refresh, **inputs)
        refs = {"selection": self._keeps[0]} if verb == "select" else {}
        return Result(stage=verb, identity="", run="", cached=True, refs=refs)

    def curve(self) -> Curve:
        """Return every evaluation of training, its steps counted from where the run began."""
        first = next(step for step in self.steps if step.stage == "begin").refs["curve"]
        begun = read_table(self.store.open(first) / TABLE_FILE).column("step")[0].as_py()
        return [(flops, step - begun, loss) for flops, step, loss in self.evaluations()]


def values_for(model: Path, seed: int) -> dict[str, Any]:
    """Return the configuration of every run of a cell."""
    shared = small_settings(model, seed, by_task=False, warm_up=WARM_UP_ROWS / ROWS)
    return {
        **shared,
        "name": "drift",
        "ingest": {**shared["ingest"], "dedupe": "exact"},
        "score": {**shared["score"], "scorer": NAMED["cascade"]["scorer"], "coverage": NAMED["cascade"]["coverage"]},
        "select": {"selector": {"method": "top_k"}, "fraction": SHARE},
        "train": {**shared["train"], "learning_rate": RATE, "epochs": 40.0, "evaluations": 6},
        "govern": {"rounds": 3, "evaluation_share": 0.0},
    }


def write_kinds(folder: Path, data: Path, tasks: Tasks, kinds: Sequence[str], seed: int) -> None:
    """Write one pool with a planted share of two kinds, and each kind's sides below its number."""
    pool, own = list[str](), set[str]()
    for number, kind in enumerate(kinds):
        write_planted(folder / str(number), data, tasks, kind, seed, SIZES, 2 * SHARE)
        pool += [json.dumps(row, sort_keys=True) for row in read(folder / str(number) / "pool.jsonl")]
        own |= {
            json.dumps(row, sort_keys=True) for side in SIDES for row in read(folder / str(number) / f"{side}.jsonl")
        }
    write(folder / "pool.jsonl", [json.loads(row) for row in dict.fromkeys(pool) if row not in own])


def turn(folder: Path, number: int) -> None:
    """Let target, validation and holdout be those of a kind."""
    for side in SIDES:
        shutil.copy(folder / str(number) / f"{side}.jsonl", folder / f"{side}.jsonl")


def run_cell(folder: Path, data: Path, tasks: Tasks, kinds: Sequence[str], seed: int, passes: float) -> dict[str, Any]:
    """Train for the first kind, change to the second, and run every arm."""
    write_kinds(folder, data, tasks, kinds, seed)
    turn(folder, 0)
    cell = Cell(folder, values_for(data / "stories260k", seed))
    config = cell.config(passes, {})
    before = Run(cell, config)
    old = trained(before)
    cell.store.close_run(before.run, "FINISHED", None)
    turn(folder, 1)
    after = Cell(folder, cell.values)  # the same store, the files as they are now
    arms, ran = dict[str, Any](), dict[str, Run]()
    for arm in ARMS:
        start = "latest" if arm in ("dynamic", "static") else "anew"
        began = time.monotonic()
        run = Run(
            after, after.config(passes, {"begin": {"start": start}}), old.selections[-1:] if arm == "static" else ()
        )
        made = trained(run)
        ran[arm] = run
        arms[arm] = {
            "curve": run.curve(),
            "flops": run.spent,
            "losses": after.losses(made.candidate),
            "agreement": agreements(run)[:1],
            "why": run.decisions[-1].reason,
            "seconds": time.monotonic() - began,
        }
        after.store.close_run(run.run, "FINISHED", None)  # the next arm passes over it: its data are equal
    steady = agreements(before) + agreements(ran["dynamic"])[1:]
    return {
        "kinds": list(kinds),
        "seed": seed,
        "pass_flops": after.pass_flops,
        "arms": arms,
        "same_target": steady,
    }


def agreements(run: Run) -> list[float]:
    """Return the rank correlations of successive scorings that a run's decisions were made from."""
    found = [decision.numbers.get("ranking_agreement") for decision in run.decisions]
    return [float(value) for value in found if value is not None]


def recovered(cell: Mapping[str, Any], arm: str, other: str) -> tuple[float, float]:
    """Return (passes, steps) from the change on until an arm was as low as another ever was; infinite where never."""
    level = min(loss for *_, loss in cell["arms"][other]["curve"])
    for flops, steps, loss in cell["arms"][arm]["curve"]:
        if loss <= level:
            return flops / cell["pass_flops"], steps
    return float("inf"), float("inf")


def figures_of(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return recovery and losses of every arm over the cells, and what `dynamic` brought beside the others."""
    figures: dict[str, Any] = {"cells": len(cells)}
    for arm in ARMS:
        found = figures[arm] = {
            "first_loss": _mean(cell["arms"][arm]["curve"][0][2] for cell in cells),
            "lowest_loss": _mean(min(loss for *_, loss in cell["arms"][arm]["curve"]) for cell in cells),
            "holdout": _mean(mean_loss(cell["arms"][arm]["losses"]) for cell in cells),
            "passes": _mean(cell["arms"][arm]["flops"] / cell["pass_flops"] for cell in cells),
        }
        for other in ("anew", "static"):
            there = [recovered(cell, arm, other) for cell in cells]
            found[f"reached_{other}"] = sum(bool(np.isfinite(passes)) for passes, _ in there)
            found[f"passes_to_{other}"], found[f"steps_to_{other}"] = (
                [_shown(value) for value in (min(side), np.median(side), max(side))]
                for side in zip(*there, strict=True)
            )
    for other in ("static", "anew"):
        pairs: list[tuple[Losses, Losses]] = [
            (cell["arms"]["dynamic"]["losses"], cell["arms"][other]["losses"]) for cell in cells
        ]
        mean, low, high = paired_interval(pairs)
        figures[f"dynamic_less_{other}"] = [round(value, 4) for value in (mean, low, high)]
    changed = [value for cell in cells for value in cell["arms"]["dynamic"]["agreement"]]
    figures["agreement_over_the_change"] = [round(value, 3) for value in changed]
    figures["agreement_of_rounds"] = [round(value, 3) for cell in cells for value in cell["same_target"]]
    return figures


def _shown(value: float) -> float | None:
    return round(float(value), 3) if np.isfinite(value) else None


def _mean(values: Any) -> float:
    return round(float(np.mean(list(values))), 4)


def run(data: Path, work: Path, quick: bool, seeds: Sequence[int], passes: float, minutes: float) -> dict[str, Any]:
    """Run every cell: arithmetic gives way to a category of instructions, or that to arithmetic."""
    tasks = read_tasks(data)
    names = draw_categories(tasks, 1)
    turns = [(names[0], ARITHMETIC), (ARITHMETIC, names[0])][: 1 if quick else None]
    cells, began = [], time.monotonic()
    for kinds in turns:
        for seed in seeds[: 1 if quick else None]:
            if time.monotonic() - began > 60 * minutes:
                break
            folder = work / f"{seed}-{turns.index(kinds)}"
            done = folder / "found.json"
            if not done.exists():
                done.write_text(json.dumps(run_cell(folder, data, tasks, kinds, seed, passes)), encoding="utf-8")
            cells.append(json.loads(done.read_text(encoding="utf-8")))
            Console(stderr=True).print(f"{seed}, {kinds[0]} to {kinds[1]}: {figures_of(cells[-1:])}")
    return figures_of(cells)


def main() -> None:
    """Parse the command line, run, and print the figures."""
    parser = Options(__doc__, "one cell: about a minute")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1200, 1201, 1202])
    parser.add_argument("--passes", type=float, default=2.0, help="over the pool, that each run may spend")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further cell after so many")
    parser.add_argument("--work", type=Path, default=None, help="keep cells here: those finished stand")
    given = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as scratch:
        work = (given.work or Path(scratch)).resolve()
        found = run(given.data, work, given.quick, given.seeds, given.passes, given.minutes)
    table = Table("arm", *(name for name in found["dynamic"]), title="After the target has changed")
    for arm in ARMS:
        table.add_row(arm, *(str(value) for value in found[arm].values()))
    Console(width=150).print(table)
    report("drift", found)


if __name__ == "__main__":
    main()
