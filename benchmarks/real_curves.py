"""Records real training curves for `benchmarks.governor --real`: own runs, by the product's own training loop.

Each run is one segment of `train` at a constant rate after warm-up, from a pretrained Llama of 260,032 parameters or a
random one of 0.4M, on rows of one kind: arithmetic, pieces of web documents, or one category of
Super-NaturalInstructions whose tasks are divided between the pool and what is held back. The pool is few rows seen over
and over, some rows seen a few times, or rows seen once. Validation and holdout are other rows of the held-back tasks
(documents, problems).
Every run makes STEPS windows of eight rows and EVALUATIONS evaluations at equal spacing, beside one before the first
step; it is made twice with the same seeds, watched on validation and on the holdout: training reads neither, so both
are one trajectory, which is checked. FLOPs are those of the run watched on validation, its evaluations included.

CURVES is the table kept in the project: one row an evaluation, `run` names model, kind, rows of the pool, technique and
rate. Runs that FOLDER/runs.jsonl holds are not made again.

    python -m benchmarks.real_curves [--quick] [--data FOLDER] [--folder FOLDER] [--write]
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cells import PIECE_CHARACTERS, read_tasks
from benchmarks.chain import report
from benchmarks.options import Options

if TYPE_CHECKING:
    from benchmarks.segment import Rows

CURVES = Path(__file__).with_name("real_curves.csv")
STEPS, WINDOW, EVALUATIONS, WARMUP, LONGEST = 144, 8, 36, 5, 128
SIZES = {"pool": STEPS * WINDOW, "validation": 32, "holdout": 80, "target": 8}
CATEGORIES = ("Question Answering", "Question Generation", "Sentence Composition")
KINDS = ("arithmetic", "web", *CATEGORIES)
FEW, SOME = 24, 192
"""Rows of a pool that is seen 48 times and of one that is seen 6 times; else each row is seen once."""
SCRATCH = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4}
"""A random Llama of 0.4M parameters that reads stories260k's tokenizer."""
COLUMNS = ("run", "step", "flops", "tokens", "train_loss", "validation_loss", "validation_se", "holdout_loss")


@dataclass(frozen=True)
class Run:
    """One curve: `model` is stories260k or scratch, `rows` of the pool, `technique` full or lora."""

    model: str
    kind: str
    rows: int
    technique: str
    rate: float

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.model}/{self.kind}/{self.rows}/{self.technique}/{self.rate:g}"


def runs() -> Iterator[Run]:
    """Return every run, the cheap ones first."""
    pools = (FEW, SOME, SIZES["pool"])
    for kind, rows, rate in product(KINDS, pools, (1e-3, 3e-3)):
        yield Run("stories260k", kind, rows, "full", rate)
    for rows in (FEW, SIZES["pool"]):
        yield Run("stories260k", "arithmetic", rows, "lora", 1e-2)
        yield Run("stories260k", "web", rows, "full", 1e-2)
    for kind, rows in product(("arithmetic", "web"), pools):
        yield Run("scratch", kind, rows, "full", 1e-3)


def rows_of(kind: str, data: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each split; no problem, document or task stands on both sides."""
    import numpy as np

    rng = np.random.default_rng([20261130, *kind.encode()])
    if kind == "arithmetic":
        with gzip.open(data / "gsm8k" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
            groups = [[_row(row["question"], row["answer"])] for row in map(json.loads, lines)]
    elif kind == "web":
        with (data / "c4_demo" / "c4_demo.jsonl").open(encoding="utf-8") as lines:
            groups = [_pieces(json.loads(line)["text"]) for line in lines]
    else:
        tasks = read_tasks(data)[kind].values()
        groups = [[_row(row["input"], row["output"]) for row in rows if len(row["input"]) < 400] for rows in tasks]
    groups = [groups[index] for index in rng.permutation(len(groups))]
    held = SIZES["validation"] + SIZES["holdout"] + SIZES["target"]
    apart, groups = ([], groups) if kind not in CATEGORIES else (groups[: len(groups) // 3], groups[len(groups) // 3 :])
    while sum(map(len, apart)) < held:
        apart.append(groups.pop(0))
    back, pool = ([row for group in side for row in group] for side in (apart, groups))
    back, pool = ([side[index] for index in rng.permutation(len(side))] for side in (back, pool))
    splits = {"pool": pool[: SIZES["pool"]]}
    for split in ("validation", "holdout", "target"):
        splits[split], back = back[: SIZES[split]], back[SIZES[split] :]
    return splits


def _row(question: str, answer: str) -> dict[str, Any]:
    return {"instruction": question, "input": "", "output": answer}


def _pieces(text: str) -> list[dict[str, Any]]:
    size = PIECE_CHARACTERS
    starts = range(0, len(text) - size + 1, size)
    return [_row(text[at : at + 60], text[at + 60 : at + size]) for at in starts]


class Recorder:
    """Makes runs in `folder`, the rows and models once each."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data, self.folder = data, folder
        self.rows = cache(self._rows)

    def model(self, name: str) -> Path:
        """Return the folder of a model with a tokenizer."""
        from benchmarks.memory_cases import llama

        real = (self.data / "stories260k").resolve()
        if name == "stories260k":
            return real
        place = self.folder / name
        if not place.is_dir():
            llama(place, **SCRATCH)
            for path in real.glob("*token*"):
                (place / path.name).write_bytes(path.read_bytes())
        return place

    def _rows(self, model: str, kind: str) -> Rows:
        from benchmarks.segment import ingested

        place = self.folder / f"{model}-{kind.replace(' ', '-')}"
        return ingested(place, self.model(model), rows_of(kind, self.data), LONGEST)

    def curve(self, run: Run, split: str) -> list[dict[str, Any]]:
        """Return the curve's rows that hold an evaluation on `split`."""
        from dataclasses import replace

        from benchmarks.segment import plan_of, trained
        from data_contracts.config import TrainConfig
        from stages.train.loop import ROWS
        from stages.train.rows import Rows as Written

        train = TrainConfig(learning_rate=run.rate, warmup_steps=WARMUP, evaluations=EVALUATIONS, snapshot_steps=10**6,
                            epochs=STEPS * WINDOW / run.rows)  # fmt: skip
        rows = self.rows(run.model, run.kind)
        watched = replace(rows, tokens={**rows.tokens, "validation": rows.tokens[split]})
        plan = plan_of({"method": run.technique}, WINDOW, 1, LONGEST)
        place = self.folder / "segment"
        result = trained(place, watched, plan, train, seed=0, count=run.rows, evaluate_start=True)
        curve = Written(place / ROWS, result["chunks"]).curve
        return [row for row in curve if row["validation_loss"] is not None]

    def record(self, run: Run) -> list[dict[str, Any]]:
        """Return a run's rows of the table."""
        seen, apart = self.curve(run, "validation"), self.curve(run, "holdout")
        same = [(row["step"], row["train_loss"]) for row in seen] == [(row["step"], row["train_loss"]) for row in apart]
        if not same:
            raise SystemExit(f"{run.name}: two runs of the same seeds took different ways")
        return [
            {
                "run": run.name,
                **{name: row[name] for name in COLUMNS[1:-1]},
                "holdout_loss": other["validation_loss"],
            }
            for row, other in zip(seen, apart, strict=True)
        ]


def read_curves(path: Path = CURVES) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each recorded run, oldest first; a training loss before the first step is None."""
    found: dict[str, list[dict[str, Any]]] = {}
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            numbers: dict[str, Any] = {name: int(row[name]) for name in ("step", "flops", "tokens")}
            numbers |= {name: float(row[name]) if row[name] else None for name in COLUMNS[4:]}
            found.setdefault(row["run"], []).append(numbers)
    return found


def write_curves(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the table; losses to 1e-5."""
    with path.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5f}" if isinstance(v, float) and math.isfinite(v) else v for k, v in row.items()})


def main() -> None:
    """Make the runs that are not known yet and print what they show."""
    parser = Options(__doc__, "two runs; under 2 minutes")
    parser.add_argument("--folder", type=Path, default=None, help="where runs are kept, so that it may be stopped")
    parser.add_argument("--write", action="store_true", help=f"write {CURVES.name} anew")
    given = parser.read()
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "runs.jsonl"
        known = [json.loads(line) for line in kept.read_text("utf-8").splitlines()] if kept.is_file() else []
        made = {rows[0]["run"]: rows for rows in known}
        recorder, chosen = Recorder(given.data, folder), list(runs())[: 2 if given.quick else None]
        for run in chosen:
            if run.name in made:
                continue
            began = time.process_time()
            made[run.name] = recorder.record(run)
            with kept.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(made[run.name]) + "\n")
            losses = [row["holdout_loss"] for row in made[run.name]]
            told = {"first": losses[0], "lowest": min(losses), "last": losses[-1], "at": losses.index(min(losses))}
            print(
                json.dumps({"run": run.name, "cpu_seconds": round(time.process_time() - began, 1), **told}), flush=True
            )
        if given.write:
            write_curves(CURVES, [row for run in chosen for row in made[run.name]])
        report("real_curves", {"runs": len(chosen), "evaluations": sum(len(made[run.name]) for run in chosen)})


if __name__ == "__main__":
    main()
