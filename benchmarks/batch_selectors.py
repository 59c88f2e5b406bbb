"""Rows picked inside training against rows taken as they come, at equal total FLOPs, on a real small model.

Planted pools (`benchmarks.cells`): a fifth are other rows of the five tasks whose rows make target, validation and
holdout, the rest rows of other categories, arithmetic and web text. Every arm has the same rows in the same order,
rate, warm-up and decay, windows of 16 rows, and a limit on all that its segment spends: looking at candidates,
directions, training and validation. Arms: `greats` (two candidates a row), the same with `curvature: 0`, `colm`. Each
is held against plain training that is given what the arm really spent, and against as many plain steps. Told are the
holdout's losses an answer token, the steps made, what share of the FLOPs choosing took, and what share of the rows
trained on was of the target's kind.

Stated before it was run: one rate (3e-3), the FLOPs of 60 plain windows (20 with `--quick`), three categories drawn by
a fixed seed, one seed each; the defaults of the selectors.

    python -m benchmarks.batch_selectors [--quick] [--data FOLDER]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cells import draw_categories, read, read_tasks, write_planted
from benchmarks.chain import report
from benchmarks.options import Options
from benchmarks.segment import Rows, ingested, loss_of, plan_of, trained

ARMS: dict[str, dict[str, Any]] = {
    "greats": {"method": "greats"},
    "greats, curvature 0": {"method": "greats", "curvature": 0.0},
    "colm": {"method": "colm"},
}
Cell = dict[str, Any]
RATE, WINDOW, MICRO, LONGEST, SHARE = 3e-3, 16, 4, 256, 0.2
SIZES = {"pool": 2500, "target": 40, "validation": 60, "holdout": 200}
SPLITS = ("pool", "target", "validation", "holdout")


def rows_of(data: Path, folder: Path, category: str, seed: int) -> tuple[Rows, frozenset[str]]:
    """Return a planted pool's rows, and the tasks that are of the target's kind."""
    write_planted(folder / "raw", data, read_tasks(data), category, seed, SIZES, SHARE)
    splits = {split: read(folder / "raw" / f"{split}.jsonl") for split in SPLITS}
    own = frozenset(row["task"] for row in splits["holdout"])
    for row in splits["pool"]:  # sources: the tasks of the kind, other tasks together, arithmetic, web text
        kind = row["task"].split()[0]
        row["task"] = row["task"] if row["task"] in own else kind if kind in ("problem", "web") else "other tasks"
    model = (data / "stories260k").resolve()
    return ingested(folder / "rows", model, splits, LONGEST, source_field="task"), own


def cell(folder: Path, rows: Rows, own: frozenset[str], arm: str, seed: int, windows: int, flops: int | None) -> Cell:
    """Train one arm; without `flops` as many plain windows."""
    import torch

    from data_contracts.config import TrainConfig
    from stages.train.rows import read_chunks

    torch.set_num_threads(1)
    selector, began = ARMS.get(arm), time.process_time()
    train = TrainConfig(learning_rate=RATE, warmup_steps=4, decay_share=0.5, evaluations=2, snapshot_steps=10**6,
                        guard=None, batch_selector=selector)  # fmt: skip
    plan = plan_of({"method": "full"}, MICRO, WINDOW // MICRO, LONGEST)
    count = windows * WINDOW if flops is None else None
    result = trained(folder, rows, plan, train, seed=seed, count=count, anneals=True, segment_flops=flops,
                     targeted=selector is not None and selector["method"] == "greats")  # fmt: skip
    at, seconds = result["position"], time.process_time() - began
    pool = rows.table("pool")
    source = dict(zip(pool.column("example_id").to_pylist(), pool.column("source").to_pylist(), strict=True))
    visited = [
        source[name]
        for chunk in read_chunks(folder / "rows", result["chunks"], "example_losses")
        for name in chunk.column("example_id").to_pylist()
    ]
    spent = at["flops"] + at["eval_flops"] + at["score_flops"] + at["select_flops"]
    return {
        "arm": arm, "seed": seed, "holdout": loss_of(folder, rows, "holdout").mean, "steps": at["step"], "flops": spent,
        "choosing": round((at["score_flops"] + at["select_flops"]) / spent, 3),
        "of_the_kind": round(sum(name in own for name in visited) / len(visited), 3),
        "cpu_seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    """Train all cells; the last line is one of JSON."""
    given = Options(__doc__, "one category, 20 windows; under a minute").read()
    windows, found = 20 if given.quick else 60, list[tuple[str, Cell, Cell, Cell]]()
    categories = draw_categories(read_tasks(given.data), 3)[: 1 if given.quick else 3]
    with tempfile.TemporaryDirectory() as name:
        for seed, category in enumerate(categories):
            home = Path(name) / str(seed)
            rows, own = rows_of(given.data, home, category, seed)
            limit = cell(home / "segment", rows, own, "plain", seed, windows, None)["flops"]
            for arm in ARMS:
                picked = cell(home / "segment", rows, own, arm, seed, windows, limit)
                plain = cell(home / "segment", rows, own, "plain", seed, windows, picked["flops"])
                like = cell(home / "segment", rows, own, "plain", seed, picked["steps"], None)
                for row in (picked, plain, like):
                    print(json.dumps({"category": category, **row}), flush=True)
                found.append((arm, picked, plain, like))
    arms = {arm: [cells for name, *cells in found if name == arm] for arm in ARMS}
    report("batch_selectors", {
        arm: {
            "holdout": round(statistics.mean(one["holdout"] for one, _, _ in cells), 3),
            "plain_holdout": round(statistics.mean(other["holdout"] for _, other, _ in cells), 3),
            "plain_holdout_as_many_steps": round(statistics.mean(like["holdout"] for _, _, like in cells), 3),
            "won": f"{sum(one['holdout'] < other['holdout'] for one, other, _ in cells)} of {len(cells)}",
            "won_as_many_steps": f"{sum(one['holdout'] < like['holdout'] for one, _, like in cells)} of {len(cells)}",
            "flops_over_plain": round(statistics.mean(one["flops"] / other["flops"] for one, other, _ in cells), 3),
            "of_the_kind": round(statistics.mean(one["of_the_kind"] for one, _, _ in cells), 3),
            "plain_of_the_kind": round(statistics.mean(other["of_the_kind"] for _, other, _ in cells), 3),
        }
        for arm, cells in arms.items()
    })  # fmt: skip


if __name__ == "__main__":
    main()
