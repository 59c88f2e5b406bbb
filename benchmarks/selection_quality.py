"""Does influence select better than chance? Real instructions, a real small model, every arm's FLOPs stated.

Super-NaturalInstructions is split by task, since all rows of a task share one instruction: a category's tasks are
divided among target, validation, holdout and pool, and no task stands on two sides. Arms train on equal numbers of
rows, share one learning-rate grid and choose rate and checkpoint on validation; the holdout is read once, at the end.

    python -m benchmarks.selection_quality [--quick] [--seeds N ...] [--pool-rows N] [--data FOLDER] [--work FOLDER]
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from benchmarks.chain import Chain, report, total
from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.config import Config
from data_contracts.cost import Cost
from data_contracts.records import Result

CATEGORY_SEED = 20260610
SHARES = {"target": 2, "validation": 1, "holdout": 2, "pool": 2}
ARMS = ("random", "influence", "target", "target+random", "target+influence")
RESAMPLES = 10_000


def read_tasks(data: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return rows by category and task."""
    tasks: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    with gzip.open(data / "super_ni" / "super_ni_permissive_150.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            tasks[row["category"]][row["task"]].append(row)
    return tasks


def draw_categories(tasks: dict[str, dict[str, list[dict[str, Any]]]], count: int) -> list[str]:
    """Return `count` of the categories with at least seven tasks, `Misc.` aside, drawn by a fixed seed."""
    large = sorted(name for name, members in tasks.items() if len(members) >= 7 and name != "Misc.")
    return sorted(np.random.default_rng(CATEGORY_SEED).choice(large, size=count, replace=False).tolist())


def divide(names: list[str], rng: np.random.Generator) -> dict[str, list[str]]:
    """Divide a category's tasks among the splits in proportion to `SHARES`, at least one each."""
    order = rng.permutation(sorted(names)).tolist()
    bounds = np.round(np.cumsum([0, *SHARES.values()]) / sum(SHARES.values()) * len(order)).astype(int)
    return {split: order[low:high] for split, low, high in zip(SHARES, bounds[:-1], bounds[1:], strict=True)}


def write_splits(
    folder: Path, tasks: dict[str, dict[str, list[dict[str, Any]]]], category: str, seed: int, sizes: dict[str, int]
) -> None:
    """Write pool, target, validation and holdout of one cell, `sizes[split]` rows of each task."""
    rng = np.random.default_rng([seed, *category.encode()])
    members = divide(list(tasks[category]), rng)
    members["pool"] = members["pool"] + sorted(
        task for name, group in tasks.items() if name != category for task in group
    )
    by_task = {task: rows for group in tasks.values() for task, rows in group.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for split, names in members.items():
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as out:
            for task in names:
                rows = by_task[task]
                for index in sorted(rng.permutation(len(rows))[: sizes[split]].tolist()):
                    kept = {key: rows[index][key] for key in ("task", "instruction", "input", "output")}
                    out.write(json.dumps(kept, ensure_ascii=False) + "\n")


def settings(model: Path, seed: int) -> dict[str, Any]:
    """Return the configuration that all cells share."""
    return {
        "name": "selection-quality",
        "seed": seed,
        "model": {"path": str(model)},
        "data": {split: f"{split}.jsonl" for split in ("pool", "target", "validation", "holdout")},
        "ingest": {"source_field": "task", "task_field": "task", "longest_tokens": 256, "truncation": "prompt_start"},
        "plan": {"techniques": [{"method": "full"}], "window": 16, "micro_batches": [16], "precision": "float32"},
        "begin": {"fraction": 0.05},
        "score": {"batch_tokens": 8192},
        "train": {"learning_rate": 1e-3, "epochs": 2, "evaluations": 3, "warmup_steps": 4},
        "govern": {"policy": {"method": "patience", "patience": 100}},
    }


class Cell:
    """One category and seed: the shared stages once, then every arm."""

    def __init__(self, folder: Path, values: dict[str, Any], rates: tuple[float, ...]) -> None:
        self.chain, self.rates = Chain(folder, values), rates
        config = self.chain.config()
        call = self.chain.call
        self.data = call("ingest", config)
        base = self.data.ref("base")
        self.plan = call(
            "plan",
            config,
            base=base,
            pool_tokens=self.data.ref("pool_tokens"),
            target_tokens=self.data.ref("target_tokens"),
        )
        self.warm = call(
            "begin",
            config,
            base=base,
            plan=self.plan.ref("plan"),
            pool_tokens=self.data.ref("pool_tokens"),
            validation_tokens=self.data.ref("validation_tokens"),
        )
        self.scores = call(
            "score",
            config,
            base=base,
            plan=self.plan.ref("plan"),
            checkpoint=self.warm.ref("checkpoint"),
            pool_tokens=self.data.ref("pool_tokens"),
            target_tokens=self.data.ref("target_tokens"),
        )

    def select(self, arm: str) -> Result:
        """Return the selection of an arm: `rows` pool rows, the target's own, or both."""
        if arm == "target":
            config = self.chain.config(select={"selector": {"method": "random"}, "fraction": 1.0})
            return self.chain.call("select", config, pool_tokens=self.data.ref("target_tokens"))
        method = "random" if arm.endswith("random") else "top_k"
        with_target = arm.startswith("target+")
        config = self.chain.config(
            select={"selector": {"method": method}, "fraction": 0.1, "include_target": with_target}
        )
        return self.chain.call(
            "select",
            config,
            pool_tokens=self.data.ref("pool_tokens"),
            scores=self.scores.ref("scores") if method == "top_k" else (),
            target_tokens=self.data.ref("target_tokens") if with_target else (),
        )

    def train(self, config: Config, selection: Result) -> Result:
        """Train one segment from the warm-up's checkpoint."""
        return self.chain.call(
            "train",
            config,
            base=self.data.ref("base"),
            plan=self.plan.ref("plan"),
            tokens=(*self.data.ref("pool_tokens"), *self.data.ref("target_tokens")),
            selection=selection.ref("selection"),
            validation_tokens=self.data.ref("validation_tokens"),
            checkpoint=self.warm.ref("checkpoint"),
        )

    def lowest(self, trained: Result) -> float:
        """Return a segment's lowest validation loss."""
        curve = read_table(self.chain.store.open(trained.refs["curve"]) / TABLE_FILE)
        return float(pc.min(curve.column("validation_loss")).as_py())

    def losses(self, checkpoint: Result | None) -> dict[str, tuple[float, int, str]]:
        """Return holdout (loss sum, answer tokens, task) by item, of a checkpoint or of the base."""
        config = self.chain.config()
        evaluated = self.chain.call(
            "evaluate",
            config,
            base=self.data.ref("base"),
            holdout=self.data.ref("holdout"),
            holdout_tokens=self.data.ref("holdout_tokens"),
            checkpoint=checkpoint.ref("checkpoint") if checkpoint else (),
        )
        table = read_table(self.chain.store.open(evaluated.refs["evaluation"]) / TABLE_FILE)
        wanted = "candidate" if checkpoint else "base"
        rows = table.filter(pc.equal(table.column("model"), wanted)).to_pylist()
        return {row["item_id"]: (row["loss_sum"], row["answer_tokens"], row["source"]) for row in rows}

    def arm(self, arm: str) -> dict[str, Any]:
        """Train an arm over the grid, keep the rate that validation prefers, and read the holdout with it."""
        selection = self.select(arm)
        tried = {rate: self.train(self.chain.config(train={"learning_rate": rate}), selection) for rate in self.rates}
        best = min(tried, key=lambda rate: self.lowest(tried[rate]))
        shared = [self.data, self.plan, self.warm] + ([self.scores] if arm.endswith("influence") else [])
        return {
            "losses": self.losses(tried[best]),
            "learning_rate": best,
            "rows": selection.refs["selection"].rows,
            "validation": self.lowest(tried[best]),
            "cost": total(*shared, selection, tried[best]),
            "cost_with_grid": total(*shared, selection, *tried.values()),
        }


def mean_loss(losses: dict[str, tuple[float, int, str]]) -> float:
    """Return the mean loss of an answer token, nats."""
    return sum(item[0] for item in losses.values()) / sum(item[1] for item in losses.values())


def paired_interval(cells: list[dict[str, Any]], arm: str, other: str, seed: int = 0) -> tuple[float, float, float]:
    """Return (mean, low, high) of arm − other over cells: nats a token, 95 %, by a bootstrap of cells, then of tasks.

    Both arms of a resample keep the same cells, tasks and items, so only their difference varies.
    """
    rng = np.random.default_rng(seed)
    tables = []
    for cell in cells:
        by_task: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for item, (loss, tokens, task) in cell[arm]["losses"].items():
            by_task[task].append((loss - cell[other]["losses"][item][0], tokens))
        sums = np.array([[sum(d for d, _ in rows), sum(n for _, n in rows)] for rows in by_task.values()], float)
        tables.append(sums)
    point = float(np.mean([table[:, 0].sum() / table[:, 1].sum() for table in tables]))
    draws = np.empty(RESAMPLES)
    for draw in range(RESAMPLES):
        chosen = rng.integers(len(tables), size=len(tables))
        ratios = []
        for index in chosen:
            rows = tables[index][rng.integers(len(tables[index]), size=len(tables[index]))]
            ratios.append(rows[:, 0].sum() / rows[:, 1].sum())
        draws[draw] = np.mean(ratios)
    low, high = np.quantile(draws, [0.025, 0.975])
    return point, float(low), float(high)


def run(data: Path, work: Path, quick: bool, seeds: list[int], pool_rows: int | None) -> dict[str, Any]:
    """Run every cell and return the figures."""
    console = Console(stderr=True)
    tasks = read_tasks(data)
    sizes = {"pool": 3, "target": 6, "validation": 6, "holdout": 12}
    if not quick:
        sizes = {"pool": 4, "target": 8, "validation": 8, "holdout": 16}
    sizes["pool"] = pool_rows or sizes["pool"]
    categories = draw_categories(tasks, 1 if quick else 3)
    seeds = seeds[:1] if quick else seeds
    rates = (1e-3, 3e-3) if quick else (5e-4, 1.5e-3)
    cells: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for category in categories:
        for seed in seeds:
            folder = work / f"{category.replace(' ', '-').lower()}-{seed}"
            write_splits(folder, tasks, category, seed, sizes)
            cell = Cell(folder, settings(data / "stories260k", seed), rates)
            outcome: dict[str, dict[str, Any]] = {
                "base": {"losses": cell.losses(None), "cost": Cost(), "rows": 0, "learning_rate": 0.0}
            }
            for arm in ARMS:
                outcome[arm] = cell.arm(arm)
            cells.append(outcome)
            for arm, found in outcome.items():
                said = f"{mean_loss(found['losses']):.4f}", f"{found['cost'].flops:.3e}"
                rows.append([category, str(seed), arm, str(found["rows"]), f"{found['learning_rate']:g}", *said])
            console.print(f"{category}, seed {seed}: " + ", ".join(f"{r[2]} {r[5]}" for r in rows[-len(outcome) :]))
    table = Table("category", "seed", "arm", "rows", "rate", "holdout loss", "FLOPs, all charged")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
    figures: dict[str, Any] = {"cells": len(cells), "categories": categories, "seeds": seeds}
    for arm in ("base", *ARMS):
        figures[f"loss_{arm}"] = round(float(np.mean([mean_loss(cell[arm]["losses"]) for cell in cells])), 4)
        figures[f"flops_{arm}"] = int(np.mean([cell[arm]["cost"].flops for cell in cells]))
        if arm != "base":
            figures[f"flops_with_grid_{arm}"] = int(np.mean([cell[arm]["cost_with_grid"].flops for cell in cells]))
    for arm, other in (("influence", "random"), ("target+influence", "target+random"), ("target+influence", "target")):
        point, low, high = paired_interval(cells, arm, other)
        figures[f"{arm}_minus_{other}"] = [round(point, 4), round(low, 4), round(high, 4)]
    figures["cells_won"] = sum(
        mean_loss(cell["influence"]["losses"]) < mean_loss(cell["random"]["losses"]) for cell in cells
    )
    return figures


def main() -> None:
    """Parse the command line, run, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell, few rows: under 3 minutes")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the splits and of every arm")
    parser.add_argument("--pool-rows", type=int, default=None, help="rows a task in the pool (4; 3 with --quick)")
    parser.add_argument("--work", type=Path, default=None, help="keep stores here, so that a second run adopts them")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report(
            "selection_quality", run(given.data, given.work or Path(scratch), given.quick, given.seeds, given.pool_rows)
        )


if __name__ == "__main__":
    main()
