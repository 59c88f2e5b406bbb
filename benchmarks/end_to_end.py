"""What the whole gives: every way of choosing, under a fixed schedule and governed, at one budget of FLOPs.

Each arm runs the pipeline's own loop under the same budget for all that it does: warm-up, scoring, probes, training and
validation. Checkpoints are chosen on a validation split that no arm trains on; the holdout is read once. No content
stands on two sides.

Pools: *planted* (a tenth is of the target's kind), *by task* (no task stands on two sides) and *web* (text without
categories, no document on two sides). In the latter two there is little or nothing to choose.

Arms: `full` (all of the pool, again and again), `random` (fresh rows by chance), `bm25`, `influence` (static),
`cascade` (bm25, then influence), `target` (its rows alone), `target+random`, `target+bm25`, `oracle` (the pool's rows
of the target's kind alone), `dynamic` (the cascade anew each round), `fixed_steps` (influence anew for the whole pool
after every fourth of the steps, the schedule of DataFlex) and `lazytrain` (`auto` over its named arms). Each under a
*fixed* schedule, which uses the budget up, and *governed* by the default policy, which may stop; so that what
choosing does is read at an equal governor and what the governor does at equal data. The rate is the best of the grid
on validation under the fixed schedule, two segments on one choice; the governed arm trains at it in at most three, and
may choose anew between them.

Figures of an arm and pool: `nats_vs_random` (holdout, at the same governor; 95 %, bootstrap of cells, then of tasks),
`flops_to_full_loss_ratio` (FLOPs spent until validation is at the lowest that `full` under the fixed schedule reached,
over the FLOPs that `full` had spent there; geometric mean of the cells that reached it, and how many did), the same
`amortised` (what choosing cost left out), `optimism` (holdout less validation), passes spent, and those spent with all
of the grid (`tuned`); seconds.

Figures of `lazytrain` and a pool: `decisions_right` (cells in which it chose where the best of bm25, cascade and
influence ended below chance under the fixed schedule, or declined where none did; a difference below 0.01 nats makes
either right), `declining_cost` (what it spent on choosing where it declined, of the budget, the most) and
`saving_of_oracle` (1 less its ratio, over 1 less the oracle's).

    python -m benchmarks.end_to_end [--quick] [--seeds N ...] [--minutes M] [--work F]
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cells import (
    ARITHMETIC,
    Tasks,
    draw_categories,
    mean_loss,
    paired_interval,
    read,
    read_tasks,
    small_settings,
    write,
    write_planted,
    write_splits,
    write_web,
)
from benchmarks.chain import report
from benchmarks.options import Options
from benchmarks.trials import Cell
from data_contracts.config import ARMS as NAMED
from flows.race import NEVER_ENDS

BUDGET, POOL_ROWS, WARM_UP_ROWS, SHARE = 2.0, 400, 32, 0.1
RATES = (1e-3, 3e-3)
PLANTED, BY_TASK, WEB = "planted", "by task", "web"
GOVERNORS = ("fixed", "governed")
EQUAL_NATS = 0.01
"""Of a difference that makes choosing and chance alike."""
CHANCE = {"selector": {"method": "random"}, "fraction": 1.0}
ALL: dict[str, Any] = {"select": CHANCE, "train": {"epochs": 40.0}}


def alone(name: str) -> dict[str, Any]:
    """Return the sections of one way of choosing, used untried."""
    return {"auto": {"arms": [name]}}


TARGET = {"include_target": True}
ARMS: dict[str, dict[str, Any]] = {
    "full": ALL,
    "random": alone("random"),
    "bm25": alone("bm25"),
    "influence": alone("influence"),
    "cascade": alone("cascade"),
    "target": {"select": {"count": 0, **TARGET}, "train": {"epochs": 40.0}},
    "target+random": {**alone("random"), "select": TARGET},
    "target+bm25": {**alone("bm25"), "select": TARGET},
    "oracle": ALL,
    "dynamic": {
        "score": {"scorer": NAMED["cascade"]["scorer"], "coverage": NAMED["cascade"]["coverage"]},
        "select": {"selector": {"method": "top_k"}, "fraction": 0.1},
        "train": {"epochs": 4.0},
        "govern": {"rounds": 4},
    },
    "fixed_steps": {
        "score": {"scorer": {"method": "influence"}},
        "select": {"selector": {"method": "top_k"}, "fraction": 0.1},
        "train": {"epochs": 40.0},
        "govern": {"rounds": 4},
    },
    "lazytrain": {"auto": {"arms": list(NAMED)}},
}
CHOOSING = ("bm25", "cascade", "influence")
"""Arms that `lazytrain` may choose instead of chance."""
QUICK = ("full", "random", "bm25", "lazytrain")


def values_for(model: Path, seed: int, pool: str, rows: int) -> dict[str, Any]:
    """Return the configuration that all arms of a cell share; in a planted pool a task's rows stand on all sides."""
    shared = small_settings(model, seed, by_task=pool == BY_TASK, warm_up=min(1.0, WARM_UP_ROWS / rows))
    return {
        **shared,
        "train": {**shared["train"], "epochs": 1, "evaluations": 6},
        "govern": {"rounds": 2, "evaluation_share": 0.0},
    }


def write_oracle(folder: Path, tasks: Tasks, kind: str) -> int:
    """Write the same splits with a pool of the target's kind alone to `folder/oracle`; return its rows."""
    for side in ("target", "validation", "holdout"):
        write(folder / "oracle" / f"{side}.jsonl", read(folder / f"{side}.jsonl"))
    mine = [
        row
        for row in read(folder / "pool.jsonl")
        if (row["task"].startswith("problem ") if kind == ARITHMETIC else row["task"] in tasks[kind])
    ]
    write(folder / "oracle" / "pool.jsonl", mine)
    return len(mine)


def run_arm(cell: Cell, name: str, governor: str, rate: float, flops: float) -> dict[str, Any]:
    """Run one arm for so many FLOPs and read the holdout with the checkpoint that validation prefers."""
    sections = {key: dict(part) for key, part in ARMS[name].items()}
    sections.setdefault("train", {})["learning_rate"] = rate
    govern = sections.setdefault("govern", {})
    if governor == "fixed":
        govern["policy"] = NEVER_ENDS
    else:
        govern.setdefault("rounds", 3)
    began = time.monotonic()
    trial, made = cell.trial(cell.config(flops / cell.pass_flops, sections))
    return {
        "rate": rate,
        "flops": trial.spent,
        "choosing_flops": trial.choosing,
        "chose": trial.chose,
        "seconds": time.monotonic() - began,
        "curve": trial.validated(),
        "losses": cell.losses(made.candidate),
        "why": trial.decisions[-1].reason,
    }


def run_cell(pool: str, kind: str, seed: int, data: Path, work: Path, quick: bool) -> dict[str, Any]:
    """Run every arm of one cell under both governors, keep in `work` what came of it, and return it."""
    folder, tasks, model = kept(pool, kind, seed, work).parent, read_tasks(data), data / "stories260k"
    write_cell(folder, data, tasks, pool, kind, seed)
    cell = Cell(folder, values_for(model, seed, pool, POOL_ROWS))
    few = write_oracle(folder, tasks, kind) if pool == PLANTED and not quick else 0
    oracle = Cell(folder / "oracle", values_for(model, seed, pool, few)) if few else None
    flops, arms = BUDGET * cell.pass_flops, dict[str, dict[str, Any]]()
    for name in QUICK if quick else ARMS:
        mine = oracle if name == "oracle" else cell
        if mine is None:
            continue
        tried = [run_arm(mine, name, "fixed", rate, flops) for rate in (RATES[-1:] if quick else RATES)]
        best = min(tried, key=lambda item: min(loss for _, loss in item["curve"]))
        governed = run_arm(mine, name, "governed", best["rate"], flops)
        grid = sum(item["flops"] for item in tried)
        arms[f"{name}, fixed"] = {**best, "tuned_flops": grid}
        arms[f"{name}, governed"] = {**governed, "tuned_flops": grid + governed["flops"]}
        shown = " and ".join(f"{mean_loss(arms[f'{name}, {governor}']['losses']):.3f}" for governor in GOVERNORS)
        Console(stderr=True).print(f"{pool}, {kind}, {seed}: {name}: {shown}, {governed['why'][:60]}", soft_wrap=True)
    for one in (cell, oracle):
        if one is not None:
            one.close()
    found_here = {"pool": pool, "kind": kind, "seed": seed, "pass_flops": cell.pass_flops, "arms": arms}
    kept(pool, kind, seed, work).write_text(json.dumps(found_here), encoding="utf-8")
    for store in folder.rglob(".lazytrain"):
        shutil.rmtree(store, ignore_errors=True)
    return found_here


def write_cell(folder: Path, data: Path, tasks: Tasks, pool: str, kind: str, seed: int) -> None:
    """Write the splits of one cell."""
    if pool == PLANTED:
        sizes = {"pool": POOL_ROWS, "target": 16, "validation": 24, "holdout": 80}
        write_planted(folder, data, tasks, kind, seed, sizes, SHARE)
    elif pool == WEB:
        write_web(folder, data, seed, {"target": 16, "validation": 24, "holdout": 80, "pool": POOL_ROWS})
    else:
        each = max(1, POOL_ROWS // (sum(map(len, tasks.values())) - len(tasks[kind])))
        write_splits(folder, tasks, kind, seed, {"pool": each, "target": 8, "validation": 24, "holdout": 24})


def kept(pool: str, kind: str, seed: int, work: Path) -> Path:
    """Return the file that holds what came of a cell once it is finished."""
    return work / f"{pool}-{kind}-{seed}".replace(" ", "-").lower() / "found.json"


def to_full(arm: dict[str, Any], full: dict[str, Any], *, amortised: bool = False) -> float | None:
    """Return FLOPs to the lowest validation loss of `full` over those that `full` needed; None where never there."""
    lowest = min(loss for _, loss in full["curve"])
    there = next(flops for flops, loss in full["curve"] if loss <= lowest)
    here = next((flops for flops, loss in arm["curve"] if loss <= lowest), None)
    if here is None:
        return None
    return (here - (arm["choosing_flops"] if amortised else 0)) / there


def geometric(ratios: Iterable[float | None]) -> float | None:
    """Return the geometric mean of those that are there."""
    found = [ratio for ratio in ratios if ratio is not None]
    return round(math.exp(float(np.mean(np.log(found)))), 4) if found else None


def figures_of(cells: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    """Return the figures of an arm, a governor's name behind it, over the cells of a pool that have it."""
    those = [cell for cell in cells if arm in cell["arms"]]
    found = [cell["arms"][arm] for cell in those]
    governor = arm.split(", ")[1]
    pairs = [(cell["arms"][arm]["losses"], cell["arms"][f"random, {governor}"]["losses"]) for cell in those]
    less, low, high = paired_interval(pairs)
    full = [cell["arms"]["full, fixed"] for cell in those]
    ratios = [to_full(one, other) for one, other in zip(found, full, strict=True)]
    lowest = [min(loss for _, loss in item["curve"]) for item in found]

    def mean(values: Iterable[float]) -> float:
        return round(float(np.mean(list(values))), 4)

    return {
        "cells": len(those),
        "loss": mean(mean_loss(item["losses"]) for item in found),
        "nats_vs_random": round(less, 4),
        "nats_vs_random_interval": [round(low, 4), round(high, 4)],
        "flops_to_full_loss_ratio": geometric(ratios),
        "reached_full_loss": sum(ratio is not None for ratio in ratios),
        "amortised": geometric(to_full(one, other, amortised=True) for one, other in zip(found, full, strict=True)),
        "optimism": mean(mean_loss(item["losses"]) - least for item, least in zip(found, lowest, strict=True)),
        "passes": mean(item["flops"] / cell["pass_flops"] for item, cell in zip(found, those, strict=True)),
        "tuned": mean(item["tuned_flops"] / cell["pass_flops"] for item, cell in zip(found, those, strict=True)),
        "seconds": mean(item["seconds"] for item in found),
    }


def decided(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how good the decisions of `lazytrain` to choose or to decline were over the cells of a pool."""
    right, declined = [], []
    for cell in cells:
        arms = cell["arms"]
        chance = mean_loss(arms["random, fixed"]["losses"])
        tried = [arms[f"{name}, fixed"] for name in CHOOSING if f"{name}, fixed" in arms]
        gain = chance - min(mean_loss(item["losses"]) for item in tried)
        mine = arms["lazytrain, governed"]
        right.append(abs(gain) < EQUAL_NATS or mine["chose"] == (gain > 0))
        if not mine["chose"]:
            declined.append(mine["choosing_flops"] / (BUDGET * cell["pass_flops"]))
    mine, oracle = (
        [to_full(cell["arms"][f"{name}, governed"], cell["arms"]["full, fixed"]) for cell in cells]
        if all(f"{name}, governed" in cell["arms"] for cell in cells)
        else []
        for name in ("lazytrain", "oracle")
    )
    savings = [
        (1 - one) / (1 - best)
        for one, best in zip(mine, oracle, strict=False)
        if one is not None and best is not None and best < 1
    ]
    return {
        "decisions_right": [sum(right), len(right)],
        "declined": len(declined),
        "declining_cost": round(max(declined), 4) if declined else None,
        "saving_of_oracle": round(float(np.mean(savings)), 4) if savings else None,
    }


def table_of(figures: dict[str, dict[str, Any]], pool: str) -> Table:
    """Return the figures of a pool for people."""
    columns = [name for name in next(iter(figures.values())) if name != "cells"]
    table = Table("arm", *columns, title=f"{pool} pools, {BUDGET:g} passes")
    for arm, found in figures.items():
        table.add_row(arm, *(str(found[name]) for name in columns))
    return table


def tasks_of(tasks: Tasks, seeds: list[int]) -> list[tuple[str, str, int]]:
    """Return (pool, kind, seed) of the cells, the kinds of pools in turns."""
    planted = [(PLANTED, kind, seed) for seed in seeds for kind in [*draw_categories(tasks, 2), ARITHMETIC]]
    others = [(BY_TASK, kind, seed) for seed in seeds for kind in draw_categories(tasks, 3)]
    others = [task for seed in seeds for task in [*(one for one in others if one[2] == seed), (WEB, "documents", seed)]]
    return [task for pair in zip_longest(planted, others) for task in pair if task]


def run(data: Path, work: Path, quick: bool, seeds: list[int], minutes: float) -> dict[str, Any]:
    """Take every cell that is finished, run the others while there is time to begin one, and return the figures."""
    began, cells = time.monotonic(), list[dict[str, Any]]()
    tasks = tasks_of(read_tasks(data), seeds)
    for task in tasks[:1] if quick else tasks:
        done = kept(*task, work)
        if done.exists():
            cells.append(json.loads(done.read_text(encoding="utf-8")))
        elif time.monotonic() - began < 60 * minutes:
            cells.append(run_cell(*task, data, work, quick))
    figures: dict[str, Any] = {}
    for pool in (PLANTED, BY_TASK, WEB):
        those = [cell for cell in cells if cell["pool"] == pool]
        names = [f"{name}, {governor}" for name in ARMS for governor in GOVERNORS]
        mine = {arm: figures_of(those, arm) for arm in names if any(arm in cell["arms"] for cell in those)}
        if mine:
            Console(width=190).print(table_of(mine, pool))
            figures[pool] = {**mine, "decisions": decided(those)}
    return figures


def main() -> None:
    """Parse the command line, run, and print the figures."""
    parser = Options(__doc__, "one planted cell, four arms, one rate: about two minutes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[820, 821, 822], help="of the splits and of every arm")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further cell after so many")
    parser.add_argument("--work", type=Path, default=None, help="keep cells here: those finished stand, others go on")
    given = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as scratch:
        work = (given.work or Path(scratch)).resolve()
        report("end_to_end", run(given.data, work, given.quick, given.seeds, given.minutes))


if __name__ == "__main__":
    main()
