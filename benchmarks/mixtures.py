"""OP-Mix's predicted loss of mixtures beside the loss after really training on them; Muennighoff's law to its value.

Three sources of real text (school maths, web pages, instructions) with target rows of each kept apart, and a small real
model that is first trained on all of them, as the pipeline's warm-up does. From there one adapter is trained on each
source, and the target's losses between them are fitted by the surface that the mixture `op_mix` fits. Then adapters are
really trained on mixtures that no fit has seen, with the same steps and rows a step, other draws and other initial
values, and their losses are compared. How probes are trained (`PROBE`) was settled on another seed than those judged.

    python -m benchmarks.mixtures [--quick] [--tune] [--seeds N ...] [--data FOLDER] [--work FOLDER]
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.chain import Chain, report
from data_contracts.cost import Cost
from data_contracts.records import Result
from stages.governor.laws.muennighoff import Muennighoff
from stages.mix.probing import Probing
from stages.stage import Work
from stages.statistics.rank import spearman

if TYPE_CHECKING:
    from stages.mix.lab import Lab

CATEGORY = "Sentence Composition"
"""Of Super-NaturalInstructions; its tasks are split, so that no target instruction stands in the pool."""
ROWS = {"pool": 220, "target": 50}
"""Of each source."""
PROBE = Probing(steps=30, window=16, learning_rate=2e-3, r=8, alpha=16)
PUBLISHED = ((6.34e9, 242e9, 25e9), 2.2256440889984477)
"""Parameters, tokens, unique tokens and the loss that the authors' notebook prints for them."""
POINTS = 20


@dataclass
class Bench:
    """What a laboratory asks of the work it is done for: seeds, scratch, and charges."""

    folder: Path
    seed_number: int
    spent: Cost = field(default_factory=Cost)

    def seed(self, *names: str | int) -> int:
        return int(self.rng(*names).integers(2**62))

    def rng(self, *names: str | int) -> np.random.Generator:
        return np.random.default_rng([self.seed_number, *repr(names).encode()])

    @contextmanager
    def progress(self, what: str, total: float | None, unit: str) -> Iterator[Any]:
        yield self

    def advance(self, amount: float = 1) -> None:
        """Nobody looks on."""

    def charge(self, cause: str, cost: Cost) -> None:
        self.spent += cost


def read_sources(data: Path) -> dict[str, dict[str, list[dict[str, str]]]]:
    """Return source → split → rows of prompt and completion, splits apart by task where there are tasks."""
    found: dict[str, dict[str, list[dict[str, str]]]] = {}
    with gzip.open(data / "gsm8k" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        maths = [json.loads(line) for line in lines]
    rows = [{"prompt": row["question"][-120:], "completion": row["answer"]} for row in maths]
    found["maths"] = {"pool": rows[: ROWS["pool"]], "target": rows[-ROWS["target"] :]}
    web = [json.loads(line)["text"] for line in (data / "c4_demo" / "c4_demo.jsonl").open(encoding="utf-8")]
    pages = [{"prompt": text[:60], "completion": text[60:260]} for text in web if len(text) > 200]
    found["web"] = {"pool": pages[: ROWS["pool"]], "target": pages[ROWS["pool"] :][: ROWS["target"]]}
    tasks: dict[str, list[dict[str, str]]] = {}
    with gzip.open(data / "super_ni" / "super_ni_permissive_150.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["category"] == CATEGORY:
                output = row["output"] if isinstance(row["output"], str) else row["output"][0]
                prompt = f"{row['instruction']}\n{row['input']}"[-120:]
                tasks.setdefault(row["task"], []).append({"prompt": prompt, "completion": output})
    names = sorted(tasks)
    split = {"target": names[:2], "pool": names[2:]}
    split = {"target": names[:2], "pool": names[2:]}
    found["sentences"] = {}
    for name, own in split.items():
        each = -(-ROWS[name] // len(own))
        found["sentences"][name] = [row for task in own for row in tasks[task][:each]][: ROWS[name]]
    return found


def prepare(data: Path, folder: Path) -> tuple[Chain, Result, Result]:
    """Write and tokenise the splits and warm the base up on the whole pool; return the store and what was given."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = read_sources(data)
    for split in ROWS:
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as out:
            for source, splits in sources.items():
                out.writelines(json.dumps({"source": source, **row}) + "\n" for row in splits[split])
    chain = Chain(
        folder,
        {
            "name": "mixtures",
            "model": {"path": str(data / "stories260k")},
            "data": {
                **{split: f"{split}.jsonl" for split in ROWS},
                "validation_fraction": 0.05,
                "holdout_fraction": 0.05,
            },
            "ingest": {"source_field": "source", "longest_tokens": 128, "truncation": "answer_end", "dedupe": "exact"},
            "plan": {"techniques": [{"method": "full"}], "window": 8, "micro_batches": [8], "precision": "float32"},
            "begin": {"fraction": 1.0},
            "train": {"learning_rate": 2e-3, "warmup_steps": 4},
        },
    )
    config = chain.config()
    made = chain.call("ingest", config)
    given = {"base": made.ref("base"), "pool_tokens": made.ref("pool_tokens")}
    plan = chain.call("plan", config, **given, target_tokens=made.ref("target_tokens")).ref("plan")
    warm = chain.call("begin", config, **given, plan=plan, validation_tokens=made.ref("validation_tokens"))
    return chain, made, warm


def laboratory(chain: Chain, data: Result, warm: Result, folder: Path, seed: int) -> Lab:
    """Open a laboratory on the warmed-up model, with its own seeds."""
    import torch

    from data_contracts.arrow import TABLE_FILE, read_table
    from data_contracts.config import TrainConfig
    from data_contracts.records import ModelPin
    from stages.mix.lab import Bench as Setting
    from stages.mix.lab import Lab

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    place = {name: chain.store.open(data.refs[name]) / TABLE_FILE for name in ("pool_tokens", "target_tokens")}
    sources = np.array(read_table(place["pool_tokens"]).column("source").to_pylist())
    _, part_N = np.unique(sources, return_inverse=True)
    pin = chain.store.record(data.refs["base"], ModelPin)
    setting = Setting(
        pin,
        chain.store.open(warm.refs["checkpoint"]),
        place["pool_tokens"],
        place["target_tokens"],
        "cpu",
        "float32",
        4096,
        TrainConfig(),
    )
    work = cast(Work, Bench(folder, seed))  # all of it that a laboratory asks for
    return Lab(setting, part_N.astype(np.int32), len(np.unique(sources)), work)


def judged(
    chain: Chain, data: Result, warm: Result, folder: Path, seed: int, how: Probing, count: int
) -> dict[str, Any]:
    """Fit the surface from one adapter a source, and really train on `count` mixtures drawn by `seed`."""
    from stages.mix.surface import fit

    began = time.perf_counter()
    lab = laboratory(chain, data, warm, folder / f"probes-{seed}", seed)
    parts = len(lab.groups)
    rng = np.random.default_rng([seed, 1])
    adapters = [lab.probe(str(part), np.eye(parts)[part], how) for part in range(parts)]
    x_XP = np.vstack([np.eye(parts), rng.dirichlet(np.ones(parts), POINTS)])
    y_XG = np.stack([lab.target_losses(adapters, x_P, None) for x_P in x_XP])
    surface = fit(x_XP, y_XG, rng, starts=3)
    probed = time.perf_counter() - began
    held_MP = np.random.default_rng([seed, 2]).dirichlet(np.ones(parts), count)
    said_MG = surface(held_MP)
    between_MG = np.stack([lab.target_losses(adapters, x_P, None) for x_P in held_MP])
    other, seen = laboratory(chain, data, warm, folder / f"trained-{seed}", 1000 + seed), []
    for number, x_P in enumerate(held_MP):
        seen.append(other.target_losses([other.probe(f"mixture-{number}", x_P, how)], np.ones(1), None))
    return {
        "groups": lab.groups,
        "x": held_MP,
        "said": said_MG,
        "between": between_MG,
        "seen": np.stack(seen),
        "alone": y_XG[:parts],
        "base": lab.target_losses([], np.zeros(0), None),
        "probe_flops": lab.flops,
        "seconds": (probed, time.perf_counter() - began),
    }


def shown(found: dict[str, Any], parts: tuple[str, ...], seed: int) -> None:
    """Print each mixture that was trained, with what was said of it."""
    table = Table(title=f"Seed {seed}: mean target loss of mixtures, nats an answer token")
    for name in (*parts, "said", "between adapters", "trained"):
        table.add_column(name, justify="right")
    for number, x_P in enumerate(found["x"]):
        losses = (found[name][number].mean() for name in ("said", "between", "seen"))
        table.add_row(*(f"{value:.2f}" for value in x_P), *(f"{value:.3f}" for value in losses))
    Console().print(table)


def correlation(said_M: np.ndarray, seen_M: np.ndarray) -> float:
    """Return the rank correlation; 0 where either side is constant and so ranks nothing."""
    return spearman(said_M, seen_M) or 0.0


def main() -> None:
    """Judge every seed and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--mixtures", type=int, default=8, help="really trained, a seed")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--work", type=Path, default=None, help="keep the stores here")
    options = parser.parse_args()
    if not options.data.is_dir():
        raise SystemExit(f"benchmarks.mixtures needs the data folder: {options.data} is absent (--data FOLDER)")
    seeds = options.seeds[:1] if options.quick else options.seeds
    folder = options.work or Path(tempfile.mkdtemp(prefix="mixtures-"))
    found = []
    try:
        chain, data, warm = prepare(options.data.resolve(), folder / "store")
        for seed in seeds:
            found.append(judged(chain, data, warm, folder, seed, PROBE, options.mixtures))
            shown(found[-1], found[-1]["groups"], seed)
    finally:
        if options.work is None:
            shutil.rmtree(folder)
    of_mean = [correlation(cell["said"].mean(axis=1), cell["seen"].mean(axis=1)) for cell in found]
    of_group = [
        correlation(cell["said"][:, group], cell["seen"][:, group])
        for cell in found
        for group in range(len(cell["groups"]))
    ]
    arguments, value = PUBLISHED
    report(
        "mixtures",
        {
            "opmix_rank_correlation": round(float(np.mean(of_mean)), 3),
            "opmix_rank_correlation_each_seed": [round(value, 3) for value in of_mean],
            "opmix_rank_correlation_of_groups": round(float(np.mean(of_group)), 3),
            "opmix_mixtures": sum(len(cell["x"]) for cell in found),
            "opmix_error_nats": round(
                float(np.mean([abs(cell["said"].mean(axis=1) - cell["seen"].mean(axis=1)).mean() for cell in found])), 4
            ),
            "opmix_range_nats": round(float(np.mean([np.ptp(cell["seen"].mean(axis=1)) for cell in found])), 4),
            "muennighoff_unit_error": abs(Muennighoff().loss(*arguments) - value),
            "seeds": seeds,
        },
    )


if __name__ == "__main__":
    main()
