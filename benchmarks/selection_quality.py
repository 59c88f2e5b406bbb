"""Does choosing pay? Real rows, a real small model, every arm given the same FLOPs for all that it does.

Each arm runs the pipeline's own loop (`flows.pipeline.trained`) under one FLOPs budget, warm-up, scoring, probes,
training and validation charged; rates come from one grid, rate and checkpoint are chosen on validation, and the holdout
is read once. Budgets are told in passes over the pool. `auto` tries ways of choosing first and pays for that as well.

    python -m benchmarks.selection_quality [--quick] [--seeds N ...] [--budgets B ...] [--jobs N] [--data F] [--work F]
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cells import (
    ARITHMETIC,
    draw_categories,
    mean_loss,
    paired_interval,
    read_tasks,
    settings,
    write_arithmetic,
    write_splits,
)
from benchmarks.chain import report
from benchmarks.options import Options
from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.config import ARMS as NAMED_ARMS
from data_contracts.config import Config, SelectConfig, parse
from data_contracts.cost import Frozen
from data_contracts.records import Decision, Origin, Plan, Ref, Result, Weighing
from data_contracts.store import Store
from flows.calling import call_directly
from flows.pipeline import trained
from flows.pipeline_run import PipelineRun
from flows.workspace import Workspace

RATES = (1e-3, 3e-3)
BUDGETS = (0.5, 1.5, 3.0)
FULL_TABLE = 1.5
"""The budget at which every arm runs; at the others those that `auto` chooses among."""
WARM_UP, PROBE_SHARE = 0.05, 0.07
"""Of the pool's rows, and of what may be spent: these pools are so small that 3 % would make too few steps."""
ARMS: dict[str, dict[str, Any]] = {
    **NAMED_ARMS,
    "difficulty": {
        "name": "difficulty",
        "scorer": {"method": "perplexity"},
        "selector": {"method": "difficulty"},
        "passes": 0.34,
    },
}
BESIDE = ("full", "target", "target+random", "target+influence", "oracle")


def values_for(model: Path, seed: int) -> dict[str, Any]:
    """Return the configuration that all cells share."""
    shared = settings(model, seed)
    return {
        **shared,
        "plan": {**shared["plan"], "window": 8, "micro_batches": [8]},
        "begin": {"fraction": WARM_UP},
        "train": {**shared["train"], "epochs": 1},
        "govern": {"policy": {"method": "patience", "patience": 1000}, "rounds": 3, "evaluation_share": 0.0},
    }


class Trial(PipelineRun):
    """A run of the loop in this process, without Prefect; its warm-up has the rate that all trials share."""

    def __init__(self, workspace: Workspace, store: Store, run: str, rate: float) -> None:
        super().__init__(workspace, store, run, call_directly)
        self._rate = rate

    def _call(
        self, workspace: Workspace, verb: str, name: str, inputs: dict[str, tuple[Ref, ...]], refresh: bool
    ) -> Result:
        train = workspace.config.train
        if verb == "train":
            train = train.model_copy(update={"learning_rate": self._rate})
        elif verb in ("plan", "begin", "govern"):
            train = train.model_copy(update={"epochs": 1.0})
        return super()._call(workspace.with_sections({"train": train}), verb, name, inputs, refresh)


class Cell:
    """One target and seed: its splits on disk and what every arm shares."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        self.folder, self.values = folder, values
        self.store = Store(self.workspace(parse(values)).address)
        self.run = self.store.open_run("cell", parse(values).model_dump(mode="json"))
        self.plan, self.target_flops = self._prices(parse(values))

    def workspace(self, config: Config) -> Workspace:
        """Return a workspace on this cell's folder."""
        return Workspace(config, self.folder / "lazytrain.yaml", "lazytrain.yaml")

    def _prices(self, config: Config) -> tuple[Plan, int]:
        trial = Trial(self.workspace(config), self.store, self.run, RATES[0])
        data = trial.call("ingest")
        planned = trial.call(
            "plan",
            base=data.ref("base"),
            pool=data.ref("pool"),
            pool_tokens=data.ref("pool_tokens"),
            target_tokens=data.ref("target_tokens"),
        )
        plan = trial.read(planned, "plan", Plan)
        tokens = read_table(self.store.open(data.refs["target_tokens"]) / TABLE_FILE).column("n_tokens").to_numpy()
        return plan, int(tokens.sum()) * plan.flops_per_token

    def config(self, arm: str, budget: float) -> Config:
        """Return an arm's configuration for a budget of so many passes over the pool."""
        flops = int(budget * self.plan.pass_flops)
        config = parse({**self.values, "budget": {"flops": flops}})
        if arm == "target":
            alone = SelectConfig(selector={"method": "random"}, count=0, include_target=True)
            passes = max(1.0, flops / self.target_flops)
            return config.model_copy(
                update={"select": alone, "train": config.train.model_copy(update={"epochs": passes})}
            )
        if arm == "auto":
            arms = list(ARMS.values())
        elif arm in ("full", "oracle"):
            arms = [{**ARMS["random"], "fraction": 1.0}]
        else:
            arms = [ARMS[arm.removeprefix("target+")]]
        update: dict[str, Frozen] = {
            "auto": parse({**self.values, "auto": {"arms": arms, "probe_share": PROBE_SHARE}}).auto
        }
        if arm == "oracle":
            update["data"] = config.data.model_copy(update={"pool": ("oracle.jsonl",)})
        if arm.startswith("target+"):
            update["select"] = config.select.model_copy(update={"include_target": True})
        return config.model_copy(update=update)

    def arm(self, arm: str, budget: float) -> dict[str, Any]:
        """Run an arm over the grid, keep the rate that validation prefers, and read the holdout with it."""
        found: list[dict[str, Any]] = []
        for rate in RATES:
            trial = Trial(self.workspace(self.config(arm, budget)), self.store, self.run, rate)
            made = trained(trial)
            costs = {step.run: step.cost.flops for step in trial.steps}
            weighed = [step for step in trial.steps if step.stage == "weigh"]
            record = self.store.record(weighed[0].refs["weighing"], Weighing) if weighed else None
            decision: Decision = trial.decisions[-1]
            found.append(
                {
                    "rate": rate,
                    "made": made,
                    "flops": sum(costs.values()),
                    "validation": decision.best_loss,
                    "chosen": record.chosen if record else ("random" if arm == "auto" else arm),
                    "raced": record is not None,
                    "forecast": next((item.expected_loss for item in record.arms if item.name == record.chosen), None)
                    if record
                    else None,
                }
            )
        best = min(found, key=lambda item: item["validation"])
        made = best.pop("made")
        return {**best, "losses": self.losses(made.data, made.candidate)}

    def losses(self, data: Result, checkpoint: tuple[Ref, ...]) -> dict[str, tuple[float, int, str]]:
        """Return holdout (loss sum, answer tokens, task) by item, of a checkpoint or, without one, of the base."""
        evaluated = call_directly(
            self.workspace(parse(self.values)),
            "evaluate",
            {
                "base": data.ref("base"),
                "holdout": data.ref("holdout"),
                "holdout_tokens": data.ref("holdout_tokens"),
                "checkpoint": checkpoint,
            },
            origin=Origin(run=self.run, name="evaluate"),
        )
        table = read_table(self.store.open(evaluated.refs["evaluation"]) / TABLE_FILE).to_pylist()
        wanted = "candidate" if checkpoint else "base"
        return {
            row["item_id"]: (row["loss_sum"], row["answer_tokens"], row["source"])
            for row in table
            if row["model"] == wanted
        }


def run_cell(task: tuple[str, int, Path, Path, bool, tuple[float, ...]]) -> dict[str, Any]:
    """Run every arm of one cell at every budget and return what came of each."""
    kind, seed, data, work, quick, budgets = task
    folder = work / f"{kind.replace(' ', '-').lower()}-{seed}"
    if kind == ARITHMETIC:
        write_arithmetic(folder, data, seed, {"pool": 280, "target": 16, "validation": 16, "holdout": 48})
    else:
        sizes = {"pool": 3, "target": 8, "validation": 8, "holdout": 16}
        write_splits(folder, read_tasks(data), kind, seed, sizes)
    cell = Cell(folder, values_for(data / "stories260k", seed))
    arms: dict[float, dict[str, dict[str, Any]]] = {}
    for budget in budgets:
        names = ["auto", *ARMS, *(BESIDE if budget == FULL_TABLE and not quick else ())]
        arms[budget] = {name: cell.arm(name, budget) for name in names}
        said = ", ".join(f"{name} {mean_loss(found['losses']):.3f}" for name, found in arms[budget].items())
        Console(stderr=True).print(
            f"{kind}, seed {seed}, {budget:g} passes: {said}; auto: {arms[budget]['auto']['chosen']}"
        )
    cell.store.close_run(cell.run, "FINISHED", None)
    return {"kind": kind, "seed": seed, "arms": arms}


def differences(cells: list[dict[str, Any]], budget: float, arm: str, other: str) -> np.ndarray:
    """Return arm − other, nats a token, one number a cell."""
    found = [cell["arms"][budget] for cell in cells]
    return np.array([mean_loss(arms[arm]["losses"]) - mean_loss(arms[other]["losses"]) for arms in found])


def interval(cells: list[dict[str, Any]], budget: float, arm: str, other: str, level: float) -> list[float]:
    """Return mean, low and high of arm − other at a budget, nats a token."""
    pairs = [(cell["arms"][budget][arm]["losses"], cell["arms"][budget][other]["losses"]) for cell in cells]
    return [round(value, 4) for value in paired_interval(pairs, level)]


def tables(cells: list[dict[str, Any]], budgets: tuple[float, ...]) -> None:
    """Print what every arm reached at every budget, and what `auto` chose."""
    out = Console(width=150)
    for budget in budgets:
        names = list(cells[0]["arms"][budget])
        table = Table("cell", *names, "auto chose", title=f"holdout loss, {budget:g} passes over the pool")
        for cell in cells:
            arms = cell["arms"][budget]
            said = [f"{mean_loss(arms[name]['losses']):.3f}" for name in names]
            table.add_row(f"{cell['kind']} {cell['seed']}", *said, arms["auto"]["chosen"])
        means = [np.mean([mean_loss(cell["arms"][budget][name]["losses"]) for cell in cells]) for name in names]
        flops = [np.mean([cell["arms"][budget][name]["flops"] for cell in cells]) for name in names]
        table.add_row("mean", *(f"{value:.3f}" for value in means), "")
        table.add_row("FLOPs", *(f"{value:.2e}" for value in flops), "")
        out.print(table)


def figures_of(cells: list[dict[str, Any]], budgets: tuple[float, ...]) -> dict[str, Any]:
    """Return the figures: per budget, auto against chance and against the best fixed arm; beside them the others."""
    figures: dict[str, Any] = {"cells": len(cells)}
    for budget in budgets:
        key = f"at_{budget:g}_passes"
        level = 1 - 0.05 / len(budgets)  # Bonferroni, the first step of Holm: what passes here passes there
        fixed = {name: float(np.mean([mean_loss(c["arms"][budget][name]["losses"]) for c in cells])) for name in ARMS}
        best = min(fixed, key=fixed.__getitem__)
        auto = float(np.mean([mean_loss(cell["arms"][budget]["auto"]["losses"]) for cell in cells]))
        spread = differences(cells, budget, "auto", "random")
        found: dict[str, Any] = {
            "loss_auto": round(auto, 4),
            **{f"loss_{name}": round(value, 4) for name, value in fixed.items()},
            "best_fixed": best,
            "regret": round(auto / fixed[best] - 1, 4),
            "auto_minus_random": interval(cells, budget, "auto", "random", level),
            "auto_minus_random_sd": round(float(spread.std(ddof=1)), 4) if len(spread) > 1 else None,
            "cells_equal_to_random": int((spread == 0).sum()),
            "chosen": {name: sum(cell["arms"][budget]["auto"]["chosen"] == name for cell in cells) for name in ARMS},
            "raced": sum(cell["arms"][budget]["auto"]["raced"] for cell in cells),
        }
        for name in cells[0]["arms"][budget]:
            if name not in ("auto", "random"):
                found[f"{name}_minus_random"] = interval(cells, budget, name, "random", level)
        planted = [cell for cell in cells if cell["kind"] != ARITHMETIC]
        if planted and len(planted) < len(cells):
            found["auto_minus_random_by_category"] = interval(planted, budget, "auto", "random", level)
        figures[key] = found
    return figures


def run(data: Path, work: Path, quick: bool, seeds: list[int], budgets: tuple[float, ...], jobs: int) -> dict[str, Any]:
    """Run every cell and return the figures."""
    kinds = draw_categories(read_tasks(data), 1 if quick else 3) + ([] if quick else [ARITHMETIC])
    tasks = [
        (kind, seed, data, work, quick, budgets)
        for seed in seeds
        for kind in kinds
        if kind != ARITHMETIC or seed == seeds[0]
    ]
    if jobs == 1:
        cells = [run_cell(task) for task in tasks]
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            cells = list(pool.map(run_cell, tasks))
    tables(cells, budgets)
    return figures_of(cells, budgets)


def main() -> None:
    """Parse the command line, run, and print the figures."""
    parser = Options(__doc__, "one cell, one budget: under 3 minutes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[200, 201, 202], help="of the splits and of every arm")
    parser.add_argument("--budgets", type=float, nargs="+", default=None, help="passes over the pool (0.5 1.5 3; 1.5)")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, each in a process of its own")
    parser.add_argument("--work", type=Path, default=None, help="keep stores here, so that a second run adopts them")
    given = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    budgets = tuple(given.budgets or ((FULL_TABLE,) if given.quick else BUDGETS))
    seeds = given.seeds[:1] if given.quick else given.seeds
    with tempfile.TemporaryDirectory() as scratch:
        work = (given.work or Path(scratch)).resolve()
        report("selection_quality", run(given.data, work, given.quick, seeds, budgets, given.jobs))


if __name__ == "__main__":
    main()
