"""Which scorer finds the rows of the target's kind? Planted relevance on real instructions, every method on one pool.

Super-NaturalInstructions is split by task, so that no target instruction stands in the pool: the target's two tasks
and the pool's relevant ones share a category and nothing else. A method's figure is the share of relevant rows among
its best R, R their number (recall@R), averaged over categories and seeds, with the operations it took in training
passes over the pool. Chance is the share of relevant rows. Relevance is not usefulness: benchmarks.selection_quality
trains.

    python -m benchmarks.relevance [--quick] [--seeds N ...] [--methods NAME ...] [--data FOLDER] [--work FOLDER]
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cells import draw_categories, read_tasks, settings
from benchmarks.chain import Chain, report, total
from benchmarks.options import Options
from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.method import names
from data_contracts.records import Result
from stages.score.scorer import Scorer

SPLITS = {"target": (2, 8), "validation": (1, 8), "holdout": (1, 1)}
"""Of the category: tasks in each split, and rows of each task. All others are in the pool, `POOL_ROWS` of each."""
POOL_ROWS = 6
ELSEWHERE = ("rho_loss", "forgetting", "learning_trajectory")
"""Scorers that need what this pipeline does not make: a reference model, several visits of every row."""


def write_cell(
    folder: Path, tasks: dict[str, dict[str, list[dict[str, Any]]]], category: str, seed: int, rows: int = POOL_ROWS
) -> set[str]:
    """Write the splits of one cell, `rows` of each of the pool's tasks, and return the pool's relevant tasks."""
    rng = np.random.default_rng([seed, *category.encode()])
    own = rng.permutation(sorted(tasks[category])).tolist()
    folder.mkdir(parents=True, exist_ok=True)
    chosen: dict[str, tuple[list[str], int]] = {}
    for split, (count, size) in SPLITS.items():
        chosen[split], own = (own[:count], size), own[count:]
    others = sorted(task for name, group in tasks.items() if name != category for task in group)
    chosen["pool"] = ([*own, *others], rows)
    by_task = {task: rows for group in tasks.values() for task, rows in group.items()}
    for split, (members, size) in chosen.items():
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as out:
            for task in members:
                for index in sorted(rng.permutation(len(by_task[task]))[:size].tolist()):
                    kept = {key: by_task[task][index][key] for key in ("task", "instruction", "input", "output")}
                    out.write(json.dumps(kept, ensure_ascii=False) + "\n")
    return set(own)


def score_all(folder: Path, model: Path, seed: int, methods: list[str]) -> tuple[Chain, dict[str, Result]]:
    """Ingest, warm up and score with every method, each from the warm-up's checkpoint."""
    chain = Chain(folder, settings(model, seed))
    config = chain.config()
    data = chain.call("ingest", config)
    base, pool, target = data.ref("base"), data.ref("pool_tokens"), data.ref("target_tokens")
    plan = chain.call("plan", config, base=base, pool_tokens=pool, target_tokens=target).ref("plan")
    validation = data.ref("validation_tokens")
    warm = chain.call("begin", config, base=base, plan=plan, pool_tokens=pool, validation_tokens=validation)
    results = {}
    for method in methods:
        results[method] = chain.call(
            "score",
            chain.config(score={"scorer": {"method": method}}),
            base=base,
            plan=plan,
            checkpoint=warm.ref("checkpoint"),
            pool_tokens=pool,
            target_tokens=target,
            pool=data.ref("pool"),
            target=data.ref("target"),
        )
    return chain, results


def recall(chain: Chain, scored: Result, relevant: set[str]) -> tuple[float, float]:
    """Return (recall@R, the share of relevant rows); a row without a score is last."""
    (ref,) = scored.ref("scores")
    table = read_table(chain.store.open(ref) / TABLE_FILE)
    hit_N = np.array([source in relevant for source in table.column("source").to_pylist()])
    score_N = np.nan_to_num(table.column("score").to_numpy().astype(np.float64), nan=-np.inf)
    best = np.argsort(-score_N, kind="stable")[: hit_N.sum()]
    return float(hit_N[best].mean()), float(hit_N.mean())


def exact_instruction(folder: Path, relevant: set[str]) -> float:
    """Return the share of relevant rows whose instruction stands in the target: what matching strings would find."""
    rows = {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        for split in ("target", "pool")
    }
    known = {row["instruction"] for row in rows["target"]}
    return float(np.mean([row["instruction"] in known for row in rows["pool"] if row["task"] in relevant]))


def main() -> None:
    """Score every cell with every method and print one table."""
    parser = Options(__doc__, "one category and seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--methods", nargs="+", default=[name for name in names(Scorer) if name not in ELSEWHERE])
    parser.add_argument("--model", type=Path, default=None, help="folder of a model; default: the data's small one")
    parser.add_argument("--work", type=Path, default=None, help="keep the stores here")
    options = parser.read()
    tasks = read_tasks(options.data)
    categories = draw_categories(tasks, 3)[: 1 if options.quick else 3]
    seeds = options.seeds[: 1 if options.quick else None]
    methods = list(dict.fromkeys([*options.methods, "grand"]))  # grand is one training pass over the pool
    work = options.work or Path(tempfile.mkdtemp())
    found, passes, chance = defaultdict(list), defaultdict(list), []
    for category in categories:
        for seed in seeds:
            folder = work / f"{category.replace(' ', '-')}-{seed}"
            relevant = write_cell(folder, tasks, category, seed)
            model = (options.model or options.data / "stories260k").resolve()
            chain, results = score_all(folder, model, seed, methods)
            found["exact instruction"].append(exact_instruction(folder, relevant))
            passes["exact instruction"].append(0.0)
            for method, scored in results.items():
                share, base_rate = recall(chain, scored, relevant)
                found[method].append(share)
                passes[method].append(total(scored).flops / total(results["grand"]).flops)
            chance.append(base_rate)
    table = Table(title=f"Planted relevance, {len(chance)} cells, chance {np.mean(chance):.3f}")
    for column in ("method", "recall@R", "lowest", "highest", "training passes"):
        table.add_column(column)
    for method in sorted(found, key=lambda name: -float(np.mean(found[name]))):
        values = found[method]
        numbers = (np.mean(values), min(values), max(values), np.mean(passes[method]))
        table.add_row(method, *(f"{number:.3f}" for number in numbers))
    Console().print(table)
    if options.work is None:
        shutil.rmtree(work, ignore_errors=True)
    report(
        "relevance",
        {
            "chance": round(float(np.mean(chance)), 4),
            "recall": {method: round(float(np.mean(values)), 4) for method, values in found.items()},
            "training_passes": {method: round(float(np.mean(values)), 3) for method, values in passes.items()},
            "cells": len(chance),
        },
    )


if __name__ == "__main__":
    main()
