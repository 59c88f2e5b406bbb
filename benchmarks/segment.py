"""One segment of `train` as the product runs it, on ingested rows, without a store around it: what the benchmarks of
techniques and of speed train with.

The loop, the optimizer, telemetry, snapshots, evaluations and the best checkpoint are the stage's own; only the plan is
given instead of searched for, so that every arm has the same window and the same micro-batches.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cells import write
from benchmarks.chain import Chain
from data_contracts.arrow import TABLE_FILE, read_table, write_table
from data_contracts.tables import SELECTION

if TYPE_CHECKING:
    import pyarrow as pa

    from data_contracts.config import TrainConfig
    from data_contracts.records import ModelPin, Plan
    from stages.train.validate import Loss
    from stages.workers.group import Channel


@dataclass(frozen=True)
class Rows:
    """Ingested rows: the model they were tokenised for, and the tokens' table of each split."""

    pin: ModelPin
    tokens: dict[str, Path]

    def table(self, split: str) -> pa.Table:
        """Return a split's tokens."""
        return read_table(self.tokens[split])


def ingested(folder: Path, model: Path, splits: dict[str, list[dict[str, Any]]], longest: int, **ingest: Any) -> Rows:
    """Run the stage `ingest` on these rows (instruction, input, output) and return what training reads."""
    from stages.model.pin import read_pin
    from stages.stage import Artifact

    for split, rows in splits.items():
        write(folder / f"{split}.jsonl", rows)
    chain = Chain(folder, {
        "name": "segment", "seed": 0, "model": {"path": str(model)},
        "data": {split: f"{split}.jsonl" for split in splits},
        "ingest": {"longest_tokens": longest, "truncation": "prompt_start"} | ingest,
    })  # fmt: skip
    made = chain.call("ingest", chain.config())
    tokens = {split: chain.store.open(made.refs[f"{split}_tokens"]) / TABLE_FILE for split in splits}
    return Rows(read_pin(Artifact(made.refs["base"], chain.store.open(made.refs["base"]))), tokens)


def plan_of(technique: dict[str, Any], micro_batch: int, accumulation: int, row_tokens: int, **more: Any) -> Plan:
    """Return a plan that trains by `technique`; what a plan predicts is left out."""
    from data_contracts.records import Plan

    unknown = {"trainable": 0, "peak_bytes": 0, "phases": {}, "flops_per_token": 0, "flops_per_token_forward": 0}
    return Plan(technique=technique, precision=more.pop("precision", "float32"), micro_batch=micro_batch,
                accumulation=accumulation, packed=False, row_tokens=row_tokens, **unknown, pass_flops=0,
                why="given by a benchmark", **more)  # fmt: skip


def trained(
    folder: Path, rows: Rows, plan: Plan, train: TrainConfig, *, seed: int, count: int | None = None,
    channel: Channel | None = None, targeted: bool = False, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train one segment in this process and return its result (`loop.RESULT`).

    Args:
        folder: scratch; emptied first.
        rows: with the splits `pool` and `validation`.
        plan, train: as of the stage.
        seed: of the order, of what is drawn, and of which rows are taken.
        count: how many rows of the pool are taken, None all.
        channel: is told of progress.
        targeted: whether training reads the split `target`.
        more: fields of `Job`.
    """
    from stages.train.job import Job, Places
    from stages.train.loop import RESULT, run_segment
    from stages.workers.group import Group

    shutil.rmtree(folder, ignore_errors=True)
    selection = selected(folder / "selection" / TABLE_FILE, rows, seed, count)
    job = Job(
        folder=str(folder),
        places=Places(tokens=(str(rows.tokens["pool"]),), selection=str(selection),
                      validation=str(rows.tokens["validation"]),
                      target=str(rows.tokens["target"]) if targeted else None),
        inputs={}, pin=rows.pin, plan=plan, train=train, order_seed=seed, torch_seed=seed,
        policy={"method": "patience", "patience": 10**6}, **more,
    )  # fmt: skip
    run_segment(job.model_dump(mode="json"), Group(), channel or Silent())
    result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    return result


def selected(path: Path, rows: Rows, seed: int, count: int | None) -> Path:
    """Write the selection of `count` rows of the pool drawn by `seed`, each once, and return where it lies."""
    import numpy as np

    pool = rows.table("pool")
    ids = np.random.default_rng(seed).permutation(pool.column("example_id").to_pylist())[:count].tolist()
    few, source = (
        len(ids),
        dict(zip(pool.column("example_id").to_pylist(), pool.column("source").to_pylist(), strict=True)),
    )
    write_table(path, SELECTION.schema, {
        "rank": list(range(few)), "example_id": ids, "weight": [1.0] * few, "repeats": [1] * few, "order": [0] * few,
        "mixture": [source[name] for name in ids], "gain": [None] * few, "reason": [""] * few,
    })  # fmt: skip
    return path


class Silent:
    """A channel to nobody."""

    def progress(self, done: int, total: int) -> None:
        """Nobody listens."""

    def report(self, metrics: Any) -> None:
        """Nobody listens."""


def loss_of(folder: Path | None, rows: Rows, split: str) -> Loss:
    """Return the loss on a split of the best checkpoint that a segment left in `folder`; None is the base."""
    from stages.model.checkpoint import load_merged
    from stages.train.loop import RESULT
    from stages.train.validate import Validation
    from stages.workers.group import Group

    best = None
    if folder is not None:
        position = json.loads((folder / RESULT).read_text(encoding="utf-8"))["position"]
        best = folder / "best" / str(position["best"]["step"])
    return Validation(rows.tokens[split], None, 8192)(load_merged(best, rows.pin), Group(), "float32")[0]
