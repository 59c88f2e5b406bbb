"""Does choosing pay? Real rows, a real small model, every arm given the same FLOPs for all that it does.

Each arm runs the pipeline's own loop (`flows.pipeline.trained`) under one FLOPs budget, warm-up, scoring, probes,
training and validation charged; the checkpoint is chosen on validation, the holdout is read once. Budgets are told in
passes over the pool. `auto` tries ways of choosing first and pays for that as well.

The protocol, stated before it was run, on seeds that nothing had seen (700 to 702). Pools of 1,250 rows. *Planted*: 5,
10 or 20 % of the pool (by seed) are of the target's kind, the rest is not (`cells.write_planted`): three categories,
and arithmetic among web text, three seeds each: 12 cells, at budgets of 0.15, 0.4 and 0.8 passes. *By task*: all five
categories with seven tasks or more, no task on two sides, two seeds: 10 cells, at 0.4 passes. Cells are run in an order
that mixes both, and the last are left out if time ends. Arms: `auto` (its four named arms; those that it finds too dear
are left out), random, and in planted pools bm25, untried, its kind taken to be a tenth of the pool. One rate for all
(3e-3), warm-up on 32 rows, probes of 5 %. What `auto` does was settled on seeds 900 to 902.

Asked: (1) planted: auto − random below zero at each budget, intervals Holm-corrected for three; (2) regret, `auto`'s
mean loss against that of each budget's best fixed arm, at most 5 %; (3) what `auto` does differs by budget: its form
(once, repeated, or a core with further rows once), how much of the pool, and how hard the rows are that are visited
(quantile in the pool of a row's loss under the base, read beside the run and not charged); (4) by task: auto − random
at most 0.01 nats, upper end of a 95 % interval. Power: on twelve development cells, at 0.8 passes, the gain varied by
0.24 nats between cells, so that 12 show 0.22 nats at 98.3 % four times in five. By task `auto` is expected to use
random untried, and then is the same training to the bit: what may go wrong there is that it does not.

    python -m benchmarks.selection_quality [--quick] [--seeds N ...] [--budgets B ...] [--minutes M] [--work F]
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
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
    read_tasks,
    small_settings,
    write_planted,
    write_splits,
)
from benchmarks.chain import report
from benchmarks.options import Options
from benchmarks.trials import Cell
from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.config import ARMS
from data_contracts.config_file import parse
from data_contracts.records import Decision, Likeness, Ref, Weighing

RATE = 3e-3
BUDGETS = (0.15, 0.4, 0.8)
BY_TASK_BUDGETS = (0.4,)
POOL_ROWS, WARM_UP_ROWS, PROBE_SHARE, MOST_PROBES = 1250, 32, 0.05, 0.2
SHARES = (0.05, 0.1, 0.2)
"""Of the target's kind in a planted pool, by the seed's place among the seeds."""
REPEATED = 1.05
"""Visits of a row from which a choice counts as repeated."""
PLANTED, BY_TASK = "planted", "by task"
FIXED = {PLANTED: ("random", "bm25"), BY_TASK: ("random",)}


def values_for(model: Path, seed: int, pool: str) -> dict[str, Any]:
    """Return the configuration that all cells share; in a planted pool a task's rows stand on all sides."""
    shared = small_settings(model, seed, by_task=pool == BY_TASK, warm_up=WARM_UP_ROWS / POOL_ROWS)
    return {
        **shared,
        "train": {**shared["train"], "learning_rate": RATE, "epochs": 1, "evaluations": 2},
        "govern": {"policy": {"method": "patience", "patience": 1000}, "rounds": 2, "evaluation_share": 0.0},
    }


class QualityCell(Cell):
    """A cell of this protocol: its arms, and how hard its rows are."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        super().__init__(folder, values)
        score = parse(values).score.model_copy(update={"scorer": {"method": "perplexity"}})
        table = self.scored({"score": score})
        ids, score_N = table.column("example_id").to_pylist(), table.column("score").to_numpy()
        quantile_N = (np.argsort(np.argsort(score_N)) + 0.5) / len(ids)
        self.hardness: dict[str, float] = dict(zip(ids, quantile_N.tolist(), strict=True))
        """Each row's quantile of loss under the base."""

    def arm(self, arm: str, budget: float) -> dict[str, Any]:
        """Run an arm for a budget in passes and read the holdout with the checkpoint that validation prefers."""
        arms = list(ARMS) if arm == "auto" else [arm]
        trial, made = self.trial(
            self.config(budget, {"auto": {"arms": arms, "probe_share": PROBE_SHARE, "most_probes": MOST_PROBES}})
        )
        weighed = [step for step in trial.steps if step.stage == "weigh"]
        record = self.store.record(weighed[0].refs["weighing"], Weighing) if weighed else None
        decision: Decision = trial.decisions[-1]
        used = trial.config.score.scorer if trial.config.select.selector["method"] != "random" else {"method": "random"}
        told = [step.refs["likeness"] for step in trial.steps if "likeness" in step.refs]
        return {
            "flops": trial.spent,
            "validation": decision.best_loss,
            "chosen": record.chosen if record else used["method"],
            "likeness": self.store.record(told[0], Likeness).model_dump() if told else None,
            "raced": record is not None,
            "visits": trial.config.train.epochs,
            **self.chosen(made.selections[-1]),
            "losses": self.losses(made.candidate),
        }

    def chosen(self, selection: Ref) -> dict[str, Any]:
        """Return how a selection is visited, how much of the pool it takes, and how hard its visits are."""
        table = read_table(self.store.open(selection) / TABLE_FILE)
        repeats = table.column("repeats").to_numpy()
        hard = np.array([self.hardness.get(name, np.nan) for name in table.column("example_id").to_pylist()])
        return {
            "unique": len(repeats) / len(self.hardness),
            "core": float((repeats > 1).sum()) / len(self.hardness),
            "hardness": float(np.average(hard, weights=repeats)),
        }


def run_cell(
    pool: str, kind: str, seed: int, share: float, data: Path, work: Path, budgets: list[float]
) -> dict[str, Any]:
    """Run every arm of one cell at every budget, keep in `work` what came of each, and return it."""
    folder = kept(pool, kind, seed, work, budgets).parent
    tasks = read_tasks(data)
    if pool == PLANTED:
        sizes = {"pool": POOL_ROWS, "target": 16, "validation": 24, "holdout": 80}
        write_planted(folder, data, tasks, kind, seed, sizes, share)
    else:
        each = POOL_ROWS // (sum(map(len, tasks.values())) - len(tasks[kind]))
        write_splits(folder, tasks, kind, seed, {"pool": each, "target": 8, "validation": 24, "holdout": 24})
    cell = QualityCell(folder, values_for(data / "stories260k", seed, pool))
    arms: dict[str, dict[str, dict[str, Any]]] = {}
    for budget in budgets:
        mine = arms[f"{budget:g}"] = {name: cell.arm(name, budget) for name in ("auto", *FIXED[pool])}
        said = ", ".join(f"{name} {mean_loss(item['losses']):.3f}" for name, item in mine.items())
        auto = said_of(mine["auto"])
        Console(stderr=True, width=150).print(f"{pool}, {kind}, {seed}, {budget:g} passes: {said}; auto: {auto}")
    cell.close()
    found: dict[str, Any] = {
        "pool": pool,
        "kind": kind,
        "seed": seed,
        "share": share,
        "pass_flops": cell.pass_flops,
        "arms": arms,
    }
    kept(pool, kind, seed, work, budgets).write_text(json.dumps(found), encoding="utf-8")
    return found


def kept(pool: str, kind: str, seed: int, work: Path, budgets: list[float]) -> Path:
    """Return the file that holds what came of a cell once it is finished."""
    name = f"found-{'-'.join(f'{budget:g}' for budget in budgets)}.json"
    return work / f"{pool}-{kind}-{seed}".replace(" ", "-").lower() / name


def said_of(arm: dict[str, Any]) -> str:
    """Return what an arm did, for people."""
    core = f", {arm['core']:.3f} as a core" if arm["core"] else ""
    raced = " (raced)" if arm["raced"] else ""
    much = f"{arm['unique']:.3f} of the pool x {arm['visits']:.1f}"
    return f"{arm['chosen']}{raced}, {much}{core}, hard {arm['hardness']:.2f}"


def form_of(arm: dict[str, Any]) -> str:
    """Return the form of a choice: fresh rows, each once, rows that are repeated, or a core with others once."""
    if arm["chosen"] == "random":
        return "by chance"
    return "core and others" if arm["core"] else "repeated" if arm["visits"] > REPEATED else "once"


def interval(cells: list[dict[str, Any]], budget: str, arm: str, other: str, level: float) -> list[float]:
    """Return mean, low and high of arm − other at a budget, nats a token."""
    pairs = [(cell["arms"][budget][arm]["losses"], cell["arms"][budget][other]["losses"]) for cell in cells]
    return [round(value, 4) for value in paired_interval(pairs, level)]


def holm(cells: list[dict[str, Any]], budgets: list[str]) -> dict[str, float]:
    """Return each budget's level, by Holm: where auto − random is told from zero, the others share what is left."""
    levels, open_ = dict.fromkeys(budgets, 0.0), list(budgets)
    while open_:
        level = 1 - 0.05 / len(open_)
        levels |= dict.fromkeys(open_, level)
        told = [budget for budget in open_ if not _holds_zero(interval(cells, budget, "auto", "random", level))]
        if not told:
            break
        open_ = [budget for budget in open_ if budget not in told]
    return levels


def _holds_zero(found: list[float]) -> bool:
    return found[1] <= 0 <= found[2]


def table_of(cells: list[dict[str, Any]], budget: str) -> Table:
    """Return what every arm reached at a budget, and what `auto` chose."""
    names = list(cells[0]["arms"][budget])
    table = Table("cell", *names, "auto chose", title=f"holdout loss, {cells[0]['pool']} pools, {budget} passes")
    for cell in cells:
        arms = cell["arms"][budget]
        auto = arms["auto"]
        said = said_of(auto)
        losses = [f"{mean_loss(arms[name]['losses']):.3f}" for name in names]
        table.add_row(f"{cell['kind']} {cell['seed']} ({cell['share']:g})", *losses, said)
    spent = [np.mean([cell["arms"][budget][name]["flops"] / cell["pass_flops"] for cell in cells]) for name in names]
    table.add_row("passes spent", *(f"{value:.4f}" for value in spent), "")
    return table


def figures_at(cells: list[dict[str, Any]], budget: str, level: float) -> dict[str, Any]:
    """Return auto against chance and against the best fixed arm, and beside them the others."""
    found = [cell["arms"][budget] for cell in cells]
    loss = {name: float(np.mean([mean_loss(arms[name]["losses"]) for arms in found])) for name in found[0]}
    best = min((name for name in loss if name != "auto"), key=loss.__getitem__)
    beyond = interval(cells, budget, "auto", best, level)
    told = [arms["auto"]["likeness"] for arms in found if arms["auto"]["likeness"]]
    gains = [mean_loss(arms["auto"]["losses"]) - mean_loss(arms["random"]["losses"]) for arms in found]
    auto = [arms["auto"] for arms in found]
    chosen = sorted({item["chosen"] for item in auto})
    return {
        "level": round(level, 4),
        **{f"loss_{name}": round(value, 4) for name, value in loss.items()},
        **{f"{name}_minus_random": interval(cells, budget, name, "random", level) for name in loss if name != "random"},
        "auto_minus_random_sd": round(float(np.std(gains, ddof=1)), 4) if len(gains) > 1 else None,
        "auto_below_random": sum(gain < 0 for gain in gains),
        "auto_equal_to_random": sum(gain == 0 for gain in gains),
        "best_fixed": best,
        "regret": [round(nats / loss[best], 4) for nats in beyond],
        "auto_minus_best_fixed": beyond,
        "moved": sorted(round(item["moved"], 2) for item in told),
        "raced": sum(item["raced"] for item in auto),
        "chosen": {name: sum(item["chosen"] == name for item in auto) for name in chosen},
        "forms": dict(Counter(map(form_of, auto))),
        "share_of_pool": [
            round(min(item["unique"] for item in auto), 4),
            round(max(item["unique"] for item in auto), 4),
        ],
        "hardness": round(float(np.mean([item["hardness"] for item in auto])), 4),
        "visits": [round(min(item["visits"] for item in auto), 2), round(max(item["visits"] for item in auto), 2)],
    }


def tasks_of(tasks: Tasks, seeds: list[int]) -> list[tuple[str, str, int, float]]:
    """Return (pool, kind, seed, planted share) of the cells, both pools in turns."""
    planted = [
        (PLANTED, kind, seed, SHARES[place % len(SHARES)])
        for place, seed in enumerate(seeds)
        for kind in [*draw_categories(tasks, 3), ARITHMETIC]
    ]
    by_task = [(BY_TASK, kind, seed, 0.0) for seed in seeds[:2] for kind in draw_categories(tasks, 5)]
    return [task for pair in zip_longest(planted, by_task) for task in pair if task]


def run(data: Path, work: Path, quick: bool, seeds: list[int], budgets: list[float], minutes: float) -> dict[str, Any]:
    """Take every cell that is finished, run the others while there is time to begin one, and return the figures."""
    began, tasks = time.monotonic(), tasks_of(read_tasks(data), seeds)
    cells: list[dict[str, Any]] = []
    for task in tasks[:1] if quick else tasks:
        mine = budgets or list(BUDGETS if task[0] == PLANTED else BY_TASK_BUDGETS)
        done = kept(*task[:3], work, mine)
        if done.exists():
            cells.append(json.loads(done.read_text(encoding="utf-8")))
        elif time.monotonic() - began < 60 * minutes:
            cells.append(run_cell(*task, data, work, mine))
    figures: dict[str, Any] = {}
    for pool in (PLANTED, BY_TASK):
        those = [cell for cell in cells if cell["pool"] == pool]
        for budget, level in holm(those, list(those[0]["arms"])).items() if those else ():
            Console(width=150).print(table_of(those, budget))
            figures[f"{pool}, {budget} passes"] = {"cells": len(those), **figures_at(those, budget, level)}
    return figures


def main() -> None:
    """Parse the command line, run, and print the figures."""
    parser = Options(__doc__, "one cell, one budget: under a minute")
    parser.add_argument("--seeds", type=int, nargs="+", default=[700, 701, 702], help="of the splits and of every arm")
    parser.add_argument(
        "--budgets",
        type=float,
        nargs="+",
        default=None,
        help="passes (0.15 0.4 0.8; by task and --quick: 0.4)",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further cell after so many")
    parser.add_argument("--work", type=Path, default=None, help="keep cells here: those finished stand, others go on")
    given = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    budgets = given.budgets or (list(BY_TASK_BUDGETS) if given.quick else [])
    with tempfile.TemporaryDirectory() as scratch:
        work = (given.work or Path(scratch)).resolve()
        report("selection_quality", run(given.data, work, given.quick, given.seeds, budgets, given.minutes))


if __name__ == "__main__":
    main()
