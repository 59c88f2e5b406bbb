"""What re-scoring costs after the model has moved: proxy_verify beside scoring the whole pool again, on the same rows.

Super-NaturalInstructions split by task, a small real model. The pool is scored after the warm-up, the best tenth is
selected and trained on (the drift is real: `stale_spearman` is how the first scores rank against fresh ones), and the
trained model scores the pool twice: whole, and with `proxy_verify` given the first scores. Costs are the manifests':
every operation of the stage, the target's pass included. `top_recall` is the share of the truly best tenth among the
best tenth by proxy_verify.

    python -m benchmarks.rescoring [--quick] [--seeds N ...] [--rows N] [--data FOLDER] [--work FOLDER]
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cells import draw_categories, read_tasks, settings
from benchmarks.chain import Chain, report, total
from benchmarks.options import Options
from benchmarks.relevance import write_cell
from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.records import Ref, Result
from stages.statistics.rank import spearman

SHARE = 0.1
"""Of the pool: what is selected, trained on and verified."""


def score_of(chain: Chain, scored: Result) -> np.ndarray:
    """Return score_N, NaN where a row has none."""
    (ref,) = scored.ref("scores")
    return np.asarray(read_table(chain.store.open(ref) / TABLE_FILE).column("score").to_numpy(), dtype=np.float64)


def best(score_N: np.ndarray) -> set[int]:
    """Return the rows of the best share."""
    order = np.argsort(-np.nan_to_num(score_N, nan=-np.inf), kind="stable")
    return set(order[: int(np.ceil(SHARE * len(order)))].tolist())


def run_cell(folder: Path, model: Path, seed: int) -> dict[str, Any]:
    """Warm up, score, select, train, and score again both ways."""
    chain = Chain(folder, settings(model, seed))
    config = chain.config(select={"fraction": SHARE})
    data = chain.call("ingest", config)
    base, pool, target = data.ref("base"), data.ref("pool_tokens"), data.ref("target_tokens")
    validation = data.ref("validation_tokens")
    plan = chain.call("plan", config, base=base, pool_tokens=pool, target_tokens=target).ref("plan")
    warm = chain.call("begin", config, base=base, plan=plan, pool_tokens=pool, validation_tokens=validation)
    given: dict[str, tuple[Ref, ...]] = {"base": base, "plan": plan, "pool_tokens": pool, "target_tokens": target}
    first = chain.call("score", config, checkpoint=warm.ref("checkpoint"), **given)
    chosen = chain.call("select", config, pool_tokens=pool, scores=first.ref("scores"), plan=plan)
    trained = chain.call(
        "train",
        config,
        base=base,
        plan=plan,
        tokens=(*pool, *target),
        selection=chosen.ref("selection"),
        validation_tokens=validation,
        checkpoint=warm.ref("checkpoint"),
    )
    given["checkpoint"] = trained.ref("checkpoint")
    whole = chain.call("score", config, **given)
    covered = chain.config(score={"coverage": {"method": "proxy_verify", "verify": SHARE}})
    partly = chain.call("score", covered, previous_scores=first.ref("scores"), **given)
    stale_N, whole_N, partly_N = (score_of(chain, scored) for scored in (first, whole, partly))
    both = np.isfinite(whole_N) & np.isfinite(partly_N) & np.isfinite(stale_N)
    said = chain.store.read_manifest(partly.run).summary
    return {
        "rows": len(whole_N),
        "spearman": spearman(partly_N[both], whole_N[both]),
        "stale_spearman": spearman(stale_N[both], whole_N[both]),
        "flops_ratio": total(partly).flops / total(whole).flops,
        "top_recall": len(best(partly_N) & best(whole_N)) / len(best(whole_N)),
        "stale_top_recall": len(best(stale_N) & best(whole_N)) / len(best(whole_N)),
        **{name: said.facts[name] for name in ("fallback", "estimated_spearman", "predicted")},
    }


def main() -> None:
    """Run every cell and print one table."""
    parser = Options(__doc__, "one category and seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--rows", type=int, default=12, help="of each of the pool's tasks")
    parser.add_argument("--model", type=Path, default=None, help="folder of a model; default: the data's small one")
    parser.add_argument("--work", type=Path, default=None, help="keep the stores here")
    options = parser.read()
    tasks = read_tasks(options.data)
    model = (options.model or options.data / "stories260k").resolve()
    work = options.work or Path(tempfile.mkdtemp())
    cells: list[dict[str, Any]] = []
    table = Table(title="Re-scoring a drifted model")
    for name in (
        "category",
        "seed",
        "rows",
        "stale",
        "proxy_verify",
        "estimated",
        "FLOPs ratio",
        "top recall",
        "fallback",
    ):
        table.add_column(name)
    for category in draw_categories(tasks, 3)[: 1 if options.quick else 3]:
        for seed in options.seeds[: 1 if options.quick else None]:
            folder = work / f"{category.replace(' ', '-')}-{seed}"
            write_cell(folder, tasks, category, seed, options.rows)
            cell = run_cell(folder, model, seed)
            cells.append(cell)
            names = ("stale_spearman", "spearman", "estimated_spearman", "flops_ratio", "top_recall")
            shown = (f"{cell[name]:.3f}" for name in names)
            table.add_row(category, str(seed), str(cell["rows"]), *shown, str(cell["fallback"]))
    Console(width=140).print(table)
    if options.work is None:
        shutil.rmtree(work, ignore_errors=True)
    figures: dict[str, Any] = {"cells": len(cells), "fallback": sum(cell["fallback"] for cell in cells)}
    for name in ("spearman", "stale_spearman", "flops_ratio", "top_recall", "stale_top_recall"):
        values = [cell[name] for cell in cells]
        figures[name] = round(float(np.mean(values)), 4)
        figures[f"{name}_range"] = [round(min(values), 4), round(max(values), 4)]
    report("rescoring", figures)


if __name__ == "__main__":
    main()
