"""How near each technique comes to full fine-tuning on a real model and real rows, at equal tokens, and in what bytes.

The model is a pretrained Llama of 260,032 parameters, the rows are Super-NaturalInstructions (input and answer, the
task's instruction left out, so that rows of 48 to 384 tokens stand beside each other); the loss is that of an answer's
token on a holdout of the same tasks. Every arm trains one segment of `train` itself: the same windows of 16 rows in the
same order, warm-up, and a linear decay over the second half. Each has its own learning rate, chosen by validation loss
on seed 0 from a grid that goes on where its best rate lies at an edge. With that rate seeds 2 and 3 are trained, on
which nothing was chosen, and their holdout losses are told. Zeroth-order arms make as many steps as the operations of
full fine-tuning pay for.

What is told is `recovered`: the loss below the base's, over that of full fine-tuning (mean of the seeds). Stated after
a pilot of 50 steps on one seed had shown where rates lie, before any cell of the table was run: at least

    adapters      0.90   half of the width in rank holds most of an update, and qlora's base is a little off
    projections   0.90   every weight moves at every step, Adam's moments alone are approximate
    blocks        0.80   a layer has a fifth of the steps; lisa's outer weights have all of them
    packed        0.70   weights of few bits: as blocks with rounding and frozen outer weights, or scales alone
    local         0.70   only the upper half reads the task, the lower one learns to keep what it was given
    capped        0.40   as packed, and a fourth of the rows alone is read by backward passes
    mixed         0.40   plain descent, two thirds of the rows read by backward passes
    zeroth        0.05   a step along one of d directions gains 1/d of a gradient step of that length (Malladi et al.
                         2023, section 4; more where the curvature's rank is low), and equal operations pay for 1.5
                         times the steps

A first table (seeds 0 and 1) had adapters and blocks fall short, and its reason was looked for on seed 0's validation
loss: full fine-tuning itself ends at 3.35 instead of 2.99 where the embeddings stay (`lora` at 3.39), and `lora` at
2.98 where they train too. So an arm whose technique leaves the embeddings out by default stands beside one that trains
them (`_embeddings`); both are held to the same share. Of `hift` and `badam` groups of two layers stand beside one,
which have a sixth of the steps (`badam`'s after its first cells). The hybrid's slope moved the layer at hand, at 0.001
of Adam's rate, and nothing was seen of it, nor at 1; it was then given what lies outside the layers, at 3 times (the
best of 1, 3 and 10 on seed 0). After its first cells `qa_lora` was given groups of 8 inputs too: over groups of 32 an
adapter has two inputs, and so two ranks, in a model 64 wide (in one of 4,096 it has 128), where the share's reason is
half of the width in rank. `lopt` moved all its blocks at one rate and recovered 0.62; on the validation loss of seeds 0
and 1 its lower block's rate was what it lacked, which is a setting since (docs/memory.md). The shares stay as they were
stated.

`gap_held` counts the arms that reach theirs, all are printed; `techniques_held` techniques of which one arm does. The
hybrid at a byte cap (`hybrid_capped`): its longest rows are read by forward passes alone; `hybrid_of_least_part` is its
predicted peak over the least of its three parts' (block-wise training, a quantised base with adapters, forward passes
alone), one row a micro-batch. Its ablations train the same rows at its rate without one part each: `hybrid_no_zeroth`,
`hybrid_no_packing`, and `hybrid_no_blocks`, which is `addax`: all weights at once, so that none waits to be packed and
no moments fit, with a grid of its own.

Done cells are kept in FOLDER/cells.jsonl and not made again: the run can be stopped at any time.

    python -m benchmarks.convergence [--quick] [--data FOLDER] [--folder FOLDER] [--arms NAME ...]
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cells import read_tasks
from benchmarks.chain import report
from benchmarks.forked import in_own_process
from benchmarks.options import Options
from benchmarks.segment import Rows, ingested, loss_of, plan_of, trained

if TYPE_CHECKING:
    from data_contracts.records import ModelPin

LEAST = {"full": 1.0, "adapters": 0.9, "projections": 0.9, "blocks": 0.8, "packed": 0.7, "local": 0.7, "capped": 0.4,
         "mixed": 0.4, "zeroth": 0.05}  # fmt: skip
"""Of full fine-tuning's gain, by family: see above."""
STEPS, WINDOW, MICRO, LONGEST = 100, 16, 4, 384
RATED_ON, SEEDS = 0, (2, 3)
"""The seed that rates are chosen on, and those that are told."""
STAY, STAY_OF_SIX, LONG = STEPS // 10, 8, 48
"""Windows of a block: two cycles through the five layers, and with the embeddings. Tokens above which the capped hybrid
keeps no activations."""
RATES = {"full": (3e-4, 1e-3, 3e-3), "adam": (1e-3, 3e-3, 1e-2), "projected": (3e-3, 1e-2, 3e-2),
         "zeroth": (3e-4, 1e-3, 3e-3), "descent": (0.1, 0.3, 1.0)}  # fmt: skip
LADDER = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
"""The steps that a grid goes on by."""


@dataclass(frozen=True)
class Arm:
    """A technique with its settings, the family whose gap it is held to, its grid, and rows a micro-batch."""

    family: str
    technique: dict[str, Any]
    rates: tuple[float, ...] = RATES["adam"]
    micro: int = MICRO
    like: str | None = None
    """Whose rate is taken instead: an ablation differs in its part alone."""


def _adapters(method: str, rates: tuple[float, ...] = RATES["adam"], **settings: Any) -> Arm:
    return Arm("adapters", {"method": method, "r": 32, "alpha": 64.0} | settings, rates)


def _projected(method: str) -> Arm:
    return Arm("projections", {"method": method, "rank": 16, "gap": STEPS // 2}, RATES["projected"])


def _hybrid(family: str, settings: dict[str, Any], **more: Any) -> Arm:
    return Arm(family, {"method": "hybrid", "block_steps": STAY, "share": 3.0} | settings, **more)


def _capped(like: str | None = None, **settings: Any) -> Arm:
    return _hybrid("capped", {"long_tokens": LONG} | settings, micro=1, like=like)


ARMS = {
    "full": Arm("full", {"method": "full"}, RATES["full"]),
    "lora": _adapters("lora"),
    "lora_embeddings": _adapters("lora", embeddings=True),
    "qlora": _adapters("qlora"),
    "qlora_embeddings": _adapters("qlora", embeddings=True),
    "qa_lora": _adapters("qa_lora", RATES["full"]),  # an adapter's input is a sum of 32
    "qa_lora_embeddings": _adapters("qa_lora", RATES["full"], embeddings=True),
    "qa_lora_groups": _adapters("qa_lora", RATES["full"], embeddings=True, group_size=8),
    "peqa": Arm("packed", {"method": "peqa"}),
    "peqa_embeddings": Arm("packed", {"method": "peqa", "embeddings": True}),
    "dqt": Arm("packed", {"method": "dqt"}, RATES["full"]),
    "baoc": Arm("projections", {"method": "baoc", "probe_steps": 1, "state_share": 0.5}, RATES["full"]),
    # samples of 4,096 numbers a matrix outweigh the default share of a model of this size
    "badam": Arm("blocks", {"method": "badam", "block_steps": STAY}),
    "badam_embeddings": Arm("blocks", {"method": "badam", "block_steps": STAY_OF_SIX, "embeddings": True}),
    "badam_pairs": Arm("blocks", {"method": "badam", "block_steps": 12, "embeddings": True, "layers": 2}),
    "hift": Arm("blocks", {"method": "hift"}),
    "hift_pairs": Arm("blocks", {"method": "hift", "layers": 2}),
    "lisa": Arm("blocks", {"method": "lisa", "block_steps": STAY}),
    "galore": _projected("galore"),
    "apollo": _projected("apollo"),
    "hybrid": _hybrid("packed", {}),
    "hybrid_embeddings": _hybrid("packed", {"block_steps": STAY_OF_SIX, "embeddings": True}),
    "lopt": Arm("local", {"method": "lopt"}, RATES["full"]),
    "mezo": Arm("zeroth", {"method": "mezo"}, RATES["zeroth"]),
    "lozo": Arm("zeroth", {"method": "lozo"}, RATES["zeroth"]),
    "subzero": Arm("zeroth", {"method": "subzero"}, RATES["zeroth"]),
    "addax": Arm("mixed", {"method": "addax", "long_tokens": 2 * LONG}, RATES["descent"]),
    "hybrid_capped": _capped(),
    "hybrid_no_zeroth": _capped("hybrid_capped", share=0.0),
    "hybrid_no_packing": _capped("hybrid_capped", bits=None),
    "hybrid_no_blocks": Arm(
        "capped", {"method": "addax", "long_tokens": LONG, "share": 1e-3}, RATES["descent"], micro=1
    ),
}


def rows_of(data: Path, folder: Path) -> Rows:
    """Ingest rows of all tasks, drawn by a fixed seed."""
    every = [
        {"instruction": row["input"], "input": "", "output": row["output"]}
        for group in read_tasks(data).values()
        for rows in group.values()
        for row in rows
        if len(row["input"]) + len(row["output"]) < 500
    ]
    random.Random(0).shuffle(every)
    sizes, splits = {"pool": 5000, "validation": 200, "holdout": 400, "target": 20}, {}
    for split, size in sizes.items():
        splits[split], every = every[:size], every[size:]
    return ingested(folder, (data / "stories260k").resolve(), splits, LONGEST)


def cell(folder: Path, rows: Rows, name: str, rate: float, seed: int, steps: int, flops: int | None) -> dict[str, Any]:
    """Train one cell; `flops` is what a zeroth-order arm may spend, evaluations included."""
    import torch

    from data_contracts.config import TrainConfig

    torch.set_num_threads(1)
    arm, began = ARMS[name], time.process_time()
    zeroth = arm.family == "zeroth"
    train = TrainConfig(learning_rate=rate, warmup_steps=10, decay_share=0.5, evaluations=4, snapshot_steps=10**6,
                        epochs=4.0 if zeroth else 1.0, guard=None)  # fmt: skip
    plan = plan_of(arm.technique, arm.micro, WINDOW // arm.micro, LONGEST)
    result = trained(folder, rows, plan, train, seed=seed, count=steps * WINDOW, anneals=True,
                     segment_flops=flops if zeroth else None)  # fmt: skip
    at = result["position"]
    return {
        "arm": name, "rate": rate, "seed": seed, "steps": at["step"], "tokens": at["tokens"],
        "flops": at["flops"] + at["eval_flops"], "validation": at["best"]["loss"] if at["best"] else None,
        "holdout": loss_of(folder, rows, "holdout").mean if at["best"] else None, "skipped": len(at["skipped"]),
        "cpu_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


class Cells:
    """The cells of one folder: made once each, appended to its file."""

    def __init__(self, folder: Path, rows: Rows, steps: int) -> None:
        self.folder, self.rows, self.steps, self.path = folder, rows, steps, folder / "cells.jsonl"
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        self.known = {self._key(found): found for found in map(json.loads, lines)}

    def _key(self, found: dict[str, Any]) -> tuple[Any, ...]:
        return (
            found["arm"],
            json.dumps(found["settings"], sort_keys=True),
            found["rate"],
            found["seed"],
            found["planned"],
        )

    def get(self, name: str, rate: float, seed: int) -> dict[str, Any]:
        """Return a cell, trained in a process of its own where it is not known."""
        flops = self.get("full", self.rate("full"), seed)["flops"] if ARMS[name].family == "zeroth" else None
        about = {"arm": name, "rate": rate, "seed": seed, "settings": ARMS[name].technique, "planned": self.steps}
        if self._key(about) not in self.known:
            work = partial(cell, self.folder / "segment", self.rows, name, rate, seed, self.steps, flops)
            found = about | in_own_process(work)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)
            self.known[self._key(found)] = found
        return self.known[self._key(about)]

    def rate(self, name: str) -> float:
        """Return the rate that validation prefers, of the arm's grid and what lies next to its best where that was an
        edge."""
        if (like := ARMS[name].like) is not None:
            return self.rate(like)
        tried: dict[float, float] = {}
        wanted = list(ARMS[name].rates)
        while wanted:
            for rate in wanted:
                tried[rate] = self.get(name, rate, RATED_ON)["validation"] or math.inf
            best = min(tried, key=lambda rate: tried[rate])
            place = LADDER.index(best)
            wanted = [rate for rate in LADDER[max(place - 1, 0) : place + 2] if rate not in tried]
        return best

    def arm(self, name: str) -> list[dict[str, Any]]:
        """Return the cells that are told of an arm, one a seed."""
        return [self.get(name, self.rate(name), seed) for seed in SEEDS]


def bytes_of(pin: ModelPin, technique: dict[str, Any], micro: int, row_tokens: int, precision: str) -> int:
    """Return the predicted peak of a window, the process aside (`benchmarks.memory` holds it against real steps)."""
    from data_contracts.config import TrainConfig
    from data_contracts.method import resolve
    from stages.plan.estimate import Estimator
    from stages.plan.trace import Shape
    from stages.technique.base import Technique

    shape = Shape(resolve(Technique, technique, "technique"), precision, row_tokens, row_tokens // 2, False)
    priced = Estimator(pin, TrainConfig(), "cpu").price(shape, micro, WINDOW // micro)
    return max(phase.total - phase.process for phase in priced.phases.values())


def table(cells: Cells, names: list[str], base: float) -> list[dict[str, Any]]:
    """Return a row an arm: losses, what it recovered of full fine-tuning's gain, and bytes here and at 8B."""
    from benchmarks.memory_cases import shape_8b

    full = cells.arm("full")
    gain = base - statistics.mean(one["holdout"] for one in full)
    for name in names:
        cells.arm(name)
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        large = shape_8b(Path(scratch))
        for name in names:
            arm, done = ARMS[name], cells.arm(name)
            mean = statistics.mean(one["holdout"] for one in done)
            row = {
                "arm": name, "family": arm.family, "rate": done[0]["rate"], "steps": done[0]["steps"],
                "losses": [round(one["holdout"], 3) for one in done], "gap_nats": round(mean - base + gain, 3),
                "recovered": round((base - mean) / gain, 3), "least": LEAST[arm.family],
                "bytes": bytes_of(cells.rows.pin, arm.technique, arm.micro, LONGEST, "float32"),
                "gib_8b": round(bytes_of(large, arm.technique, 1, 512, "bfloat16") / 2**30, 2),
            }  # fmt: skip
            print(json.dumps(row), flush=True)
            found.append(row)
    return found


def capped(pin: ModelPin) -> dict[str, Any]:
    """Return the peaks of the capped hybrid and of its three parts, one row a micro-batch."""
    parts = ({"method": "badam"}, {"method": "qlora"}, {"method": "mezo"})
    least = min(bytes_of(pin, part, 1, LONGEST, "float32") for part in parts)
    own = bytes_of(pin, ARMS["hybrid_capped"].technique, 1, LONGEST, "float32")
    return {"hybrid_bytes": own, "hybrid_of_least_part": round(own / least, 3)}


def main() -> None:
    """Make the cells that are not there yet, and print the table."""
    parser = Options(__doc__, "full, lora and hybrid, 20 steps; under 3 minutes")
    parser.add_argument("--folder", type=Path, default=None, help="keep the cells here, and go on with those there")
    parser.add_argument("--arms", nargs="+", choices=sorted(ARMS), default=list(ARMS))
    given = parser.read()
    names, steps = (["full", "lora", "hybrid"], 20) if given.quick else (given.arms, STEPS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = rows_of(given.data, folder / "rows")
        base = loss_of(None, rows, "holdout").mean
        found = table(Cells(folder, rows, steps), names, base)
        best_of: dict[str, bool] = {}
        for row in found:
            method = ARMS[row["arm"]].technique["method"]
            best_of[method] = best_of.get(method, False) or row["recovered"] >= row["least"]
        report("convergence", {
            "base": round(base, 3),
            "gap_held": f"{sum(row['recovered'] >= row['least'] for row in found)} of {len(found)}",
            "techniques_held": f"{sum(best_of.values())} of {len(best_of)}",
            "recovered": {row["arm"]: row["recovered"] for row in found},
            **({} if given.quick else capped(rows.pin)),
        })  # fmt: skip


if __name__ == "__main__":
    main()
