"""Does influence select better than chance? Real instructions, a real small model, every arm's FLOPs stated.

Super-NaturalInstructions is split by task, since all rows of a task share one instruction: a category's tasks are
divided among target, validation, holdout and pool, and no task stands on two sides. Arms train on equal numbers of
rows, share one learning-rate grid and choose rate and checkpoint on validation; the holdout is read once, at the end.

    python -m benchmarks.equal_rows [--quick] [--seeds N ...] [--pool-rows N] [--data FOLDER] [--work FOLDER]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from benchmarks.cells import (
    Losses,
    draw_categories,
    mean_loss,
    paired_interval,
    read_tasks,
    settings,
    write_splits,
)
from benchmarks.chain import Chain, report, total
from benchmarks.options import Options
from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.config import Config
from data_contracts.cost import Cost
from data_contracts.records import Result

ARMS = ("random", "influence", "target", "target+random", "target+influence")


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

    def losses(self, checkpoint: Result | None) -> Losses:
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
        point, low, high = paired_interval([(cell[arm]["losses"], cell[other]["losses"]) for cell in cells])
        figures[f"{arm}_minus_{other}"] = [round(point, 4), round(low, 4), round(high, 4)]
    figures["cells_won"] = sum(
        mean_loss(cell["influence"]["losses"]) < mean_loss(cell["random"]["losses"]) for cell in cells
    )
    return figures


def main() -> None:
    """Parse the command line, run, and print the figures."""
    parser = Options(__doc__, "one cell, few rows: under 3 minutes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the splits and of every arm")
    parser.add_argument("--pool-rows", type=int, default=None, help="rows a task in the pool (4; 3 with --quick)")
    parser.add_argument("--work", type=Path, default=None, help="keep stores here, so that a second run adopts them")
    given = parser.read()
    with tempfile.TemporaryDirectory() as scratch:
        report("equal_rows", run(given.data, given.work or Path(scratch), given.quick, given.seeds, given.pool_rows))


if __name__ == "__main__":
    main()
