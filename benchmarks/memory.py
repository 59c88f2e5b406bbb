"""Predicted against really measured peaks of training, for every technique and saving, and a plan for an 8B model.

What is measured is in `memory_cases`, how in `memory_steps`.

    median_error, worst_error   |predicted - measured| / measured over all cases, the process's own bytes left out
    scratch_mib                 most that the kernels' library took past torch's allocator, at the most
    held                        of plans made for budgets between, how many really stayed within; refused ones that
                                really exceed are `refused`
    hybrid_of_least_part        bytes that the hybrid takes on long rows, of those of the least of its three parts
    better_found                of 200 (model, budget) pairs, where a search of every way finds a better one
    seconds_8b                  CPU seconds of a whole plan for Llama-3.1-8B's shape where memory is short

    python -m benchmarks.memory [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.chain import report
from benchmarks.forked import in_own_process
from benchmarks.memory_cases import SIZES, TOKENS, WINDOW, cases, llama, shape_8b, shape_of
from benchmarks.memory_steps import measured

if TYPE_CHECKING:
    from data_contracts.records import ModelPin
    from stages.plan.estimate import Estimator
    from stages.plan.search import Way

TORCHTUNE_GIB = {"full": "18.9 to 37.4", "lora": "16.2 to 30.3"}
"""Llama-3.1-8B, batch 2, packed rows of 2,048 tokens: torchtune's README; the smaller figure on a 24 GB card with its
memory savers, weights in bfloat16."""
GIB, MIB = 2**30, 2**20


def compare(pin: ModelPin, size: str) -> list[dict[str, Any]]:
    """Return predicted and measured bytes of every case."""
    from data_contracts.config import TrainConfig
    from stages.plan.estimate import Estimator

    estimator, rows = Estimator(pin, TrainConfig(), "cpu", host="meta"), []
    for shape, micro, accumulation, blocks in cases(pin.layers):
        phases = estimator.phases(shape, micro, accumulation, blocks)
        predicted = max(phase.total - phase.process for name, phase in phases.items() if name != "load")
        found = in_own_process(partial(measured, pin, shape, micro, accumulation, blocks))
        row = {
            "model": size, "technique": type(shape.technique).name(), "precision": shape.precision, "micro": micro,
            "states": shape.optimizer_states, "chunks": shape.loss_chunks, "inside": shape.update_in_backward,
            "shards": shape.shards, "offloaded": shape.offload_activations, "recomputed": len(blocks),
            "predicted": predicted, "measured": found["bytes"], "scratch": found["scratch"],
            "error": predicted / found["bytes"] - 1,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def capped(pin: ModelPin) -> dict[str, Any]:
    """Return what the hybrid and each of its three parts really take on long rows, one a micro-batch.

    With a memory of anything between the hybrid's and the least of the parts', it alone trains.
    """
    from data_contracts.method import resolve
    from stages.technique.base import Technique

    ways = ({"method": "badam"}, {"method": "qlora", "r": 16}, {"method": "mezo"},
            {"method": "hybrid", "bits": 4, "long_tokens": 96})  # fmt: skip
    taken = {}
    for settings in ways:
        technique = resolve(Technique, settings, "technique")
        shapes = [
            replace(shape_of(str(settings["method"])), technique=technique, row_tokens=length, answers=48)
            for length in technique.traced_lengths(384)
        ]
        taken[str(settings["method"])] = max(
            int(in_own_process(partial(measured, pin, shape, 1, 2, ()))["bytes"]) for shape in shapes
        )
        print(json.dumps({"cap": settings, "bytes": taken[str(settings["method"])]}), flush=True)
    return {"hybrid_of_least_part": round(taken.pop("hybrid") / min(taken.values()), 3)}


def ways_of(estimator: Estimator, layers: int) -> list[tuple[int, float, int]]:
    """Return (technique's place, worth, peak) of every compatible way, each choice of blocks tried; nothing is shared
    with the search but prices."""
    found = []
    for place, name in enumerate(("full", "lora")):
        phases = estimator.phases(shape_of(name), 1, 2)["forward"]
        much = phases.moments >= 0.05 * phases.weights
        for states, chunks, inside in itertools.product(("float32", "8bit"), (1, 8), (False, True)):
            if (inside or states == "8bit") and not much:
                continue
            shape = shape_of(name, optimizer_states=states, loss_chunks=chunks, update_in_backward=inside)
            for micro in (WINDOW,) if inside else (4, 2, 1):
                accumulation = math.ceil(WINDOW / micro)
                for choice in itertools.product((False, True), repeat=layers):
                    blocks = tuple(at for at, again in enumerate(choice) if again)
                    priced = estimator.price(shape, micro, accumulation, blocks)
                    speed = TOKENS * WINDOW / priced.seconds * (0.95 if states == "8bit" else 1.0)
                    found.append((place, speed, priced.peak_bytes))
    return found


def searched(pin: ModelPin, budgets: int, run: int) -> dict[str, Any]:
    """Compare the search with a search of every way for random budgets, and really run some of its plans."""
    import numpy as np

    from data_contracts.config import PlanConfig, TrainConfig
    from data_contracts.errors import DoesNotFitError
    from stages.plan.estimate import Estimator
    from stages.plan.search import search

    estimator = Estimator(pin, TrainConfig(), "cpu")
    every = ways_of(estimator, pin.layers)
    peaks = sorted({peak for _, _, peak in every})
    plan, draw = PlanConfig(micro_batches=(4, 2, 1), headroom=0.0), np.random.default_rng(pin.layers)
    better, held, refused, pairs = 0, 0, 0, 0
    for number in range(budgets):
        limit = int(draw.integers(peaks[0] - MIB, peaks[-1]))
        fitting = [(place, -worth) for place, worth, peak in every if peak <= limit]
        try:
            chosen, ways = search(
                estimator, [shape_of("full"), shape_of("lora")], plan, window=WINDOW, workers=0, limit=limit
            )
        except DoesNotFitError as error:
            better += bool(fitting) or error.needed_bytes != peaks[0]
            continue
        best = min(fitting)
        better += (chosen.order, -chosen.worth) > (best[0], best[1] * (1 - 1e-9))
        if number < run:
            pairs += 1
            held += _really(pin, chosen) <= limit
            out = min((way for way in ways if not way.fits), key=lambda way: way.peak_bytes, default=None)
            refused += out is None or _really(pin, out) > limit
    return {"pairs": budgets, "better": better, "run": pairs, "held": held, "refused": refused}


def _really(pin: ModelPin, way: Way) -> int:
    process = next(iter(way.phases.values())).process
    asked = (way.shape, way.micro_batch, way.accumulation, way.recomputed)
    return int(in_own_process(partial(measured, pin, *asked))["bytes"]) + process


def plan_8b(folder: Path) -> dict[str, Any]:
    """Return CPU seconds of a whole plan for an 8B model in 80 GiB, and the front of each technique."""
    from data_contracts.config import PlanConfig, TrainConfig
    from stages.plan.estimate import Estimator
    from stages.plan.search import front, search

    pin = shape_8b(folder)
    shapes = [replace(shape_of(name, precision="bfloat16"), row_tokens=2048, answers=2048) for name in ("full", "lora")]
    estimator, began = Estimator(pin, TrainConfig(), "cpu"), time.process_time()
    plan = PlanConfig(micro_batches=(2, 1))
    chosen, ways = search(estimator, shapes, plan, window=4, workers=0, limit=80 * GIB)
    estimator.flops(chosen.shape, chosen.recomputed)
    seconds = time.process_time() - began
    table = [
        {"way": way.name, "gib": round((way.peak_bytes - next(iter(way.phases.values())).process) / GIB, 1),
         "tokens_per_second": round(way.tokens_per_second, 1)}
        for order in (0, 1) for way in front([way for way in ways if way.order == order])
    ]  # fmt: skip
    return {"seconds": seconds, "chosen": chosen.name, "ways": len(ways), "table": table}


def main() -> None:
    """Run all parts; the last line is one of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smaller model, 20 budgets")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as name:
        home, rows = Path(name), []
        large = in_own_process(partial(plan_8b, home / "8b"))
        for line in large["table"]:
            print(json.dumps(line), flush=True)
        parts = capped(llama(home / "cap", **SIZES["20M"]))
        for size in list(SIZES)[:1] if quick else SIZES:
            rows += compare(llama(home / size, **SIZES[size]), size)
        tried = [
            searched(llama(home / f"s{number}", **SIZES["3M"] | {"num_hidden_layers": layers, "hidden_size": hidden}),
                     20 if quick else 50, 2 if quick else 3)
            for number, (layers, hidden) in enumerate([(4, 192)] if quick else [(4, 192), (5, 96), (4, 384), (5, 240)])
        ]  # fmt: skip
    errors = [abs(row["error"]) for row in rows]
    report("memory", {
        **parts,
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "cases": len(errors),
        "scratch_mib": round(max(row["scratch"] for row in rows) / MIB, 1),
        "seconds_8b": round(large["seconds"], 2),
        "chosen_8b": large["chosen"],
        "torchtune_gib": TORCHTUNE_GIB,
        "pairs": sum(item["pairs"] for item in tried),
        "better_found": sum(item["better"] for item in tried),
        **{name: f"{sum(item[name] for item in tried)} of {sum(item['run'] for item in tried)}"
           for name in ("held", "refused")},
    })  # fmt: skip


if __name__ == "__main__":
    main()
