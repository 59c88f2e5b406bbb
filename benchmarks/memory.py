"""Predicted against really measured peaks of training, for every technique and saving, and a plan for an 8B model.

A real optimizer step (the second one, after a first that makes the moments) runs under torch's profiler, whose
allocation events give every byte that torch's allocator hands out; what stands all the time (weights, buffers, moments)
is added from the tensors themselves. Scratch that the kernels' library takes past the allocator is not among them: it
is bounded by what the resident size grew more than the events say, and stated apart (`scratch_mib`).

    median_error, worst_error   |predicted - measured| / measured over all cases, the process's own bytes left out
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
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.chain import report
from benchmarks.forked import in_own_process

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from data_contracts.records import ModelPin
    from stages.plan.estimate import Estimator
    from stages.plan.search import Way
    from stages.plan.trace import Shape

SIZES: dict[str, dict[str, Any]] = {
    "3M": {"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 5},
    "20M": {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
}
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
TORCHTUNE_GIB = {"full": "18.9 to 37.4", "lora": "16.2 to 30.3"}
"""Llama-3.1-8B, batch 2, packed rows of 2,048 tokens: torchtune's README; the smaller figure on a 24 GB card with its
memory savers, weights in bfloat16."""
MICRO_BATCH, TOKENS, ANSWERS, WINDOW = 4, 128, 64, 8
GIB, MIB = 2**30, 2**20


def llama(folder: Path, **sizes: int) -> ModelPin:
    """Write a random Llama of these sizes and pin it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from data_contracts.config import ModelConfig
    from stages.model.load import pin_model

    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**{**heads, "max_position_embeddings": 512, **sizes})).save_pretrained(folder)
    return pin_model(ModelConfig(path=str(folder)), Path("/"))


def shape_8b(folder: Path) -> ModelPin:
    """Pin Llama-3.1-8B's shape: a plan reads no weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from data_contracts.canonical import file_sha256
    from data_contracts.records import FileEntry, ModelPin

    LlamaConfig(**LLAMA_8B, tie_word_embeddings=False, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    path = folder / "config.json"
    entry = FileEntry(path=path.name, bytes=path.stat().st_size, sha256=file_sha256(path))
    return ModelPin(source="llama-3.1-8b", locator=str(folder), digest="0" * 64, architecture="LlamaForCausalLM",
                    parameters=8_030_261_248, layers=32, hidden=4096, vocabulary=128256, tied_embeddings=False,
                    longest=131072, tokenizer_digest="0" * 64, files=(entry,))  # fmt: skip


VARIANTS: tuple[dict[str, Any], ...] = (
    {"method": "lora", "embeddings": True}, {"method": "badam", "embeddings": True}, {"method": "hift", "layers": 2},
    {"method": "hybrid", "embeddings": True},
)  # fmt: skip
"""Techniques whose settings change what trains at once."""


def shape_of(method: str, settings: dict[str, Any] | None = None, **more: Any) -> Shape:
    """Return the shape of the rows measured here."""
    from data_contracts.method import resolve
    from stages.plan.trace import Shape
    from stages.technique.base import Technique

    technique = resolve(Technique, {"method": method} | (settings or {}), "technique")
    return Shape(technique, more.pop("precision", "float32"), TOKENS, ANSWERS, False, **more)


def cases(layers: int) -> list[tuple[Shape, int, int, tuple[int, ...]]]:
    """Return (shape, micro-batch, accumulation, recomputed blocks) of every technique and saving."""
    from data_contracts.method import names
    from stages.technique.base import Technique

    some, every = tuple(range(layers // 2)), tuple(range(layers))
    found = [
        (shape_of(name), MICRO_BATCH, 2, blocks)
        for name in names(Technique)
        for blocks in ((), every)
        if not blocks or shape_of(name).technique.whole
    ]  # of others no plan recomputes any
    found += [(shape_of(each["method"], each), MICRO_BATCH, 2, blocks) for each in VARIANTS for blocks in ((), every)]
    for name in ("full", "lora"):
        found += [
            (shape_of(name), MICRO_BATCH, 2, some),
            (shape_of(name, precision="bfloat16"), MICRO_BATCH, 2, some),
            (shape_of(name, loss_chunks=8), MICRO_BATCH, 2, every),
            (shape_of(name, update_in_backward=True), WINDOW, 1, ()),
            (shape_of(name, optimizer_states="8bit"), MICRO_BATCH, 2, ()),
            (shape_of(name, optimizer_states="8bit", loss_chunks=8, update_in_backward=True), WINDOW, 1, every),
            (shape_of(name, offload_activations=True), MICRO_BATCH, 2, ()),
            (shape_of(name, optimizer_states="host"), MICRO_BATCH, 2, every),
            (
                shape_of(
                    name, optimizer_states="host", offload_activations=True, loss_chunks=8, update_in_backward=True
                ),
                WINDOW,
                1,
                (),
            ),
            (shape_of(name, shards=2), MICRO_BATCH, 2, ()),
            (shape_of(name, shards=2, loss_chunks=8), MICRO_BATCH, 2, every),
        ]
    for states in ("4bit", "mini"):
        found += [
            (shape_of("full", optimizer_states=states), MICRO_BATCH, 2, every),
            (shape_of("full", optimizer_states=states, update_in_backward=True), WINDOW, 1, every),
        ]
    return found


def measured(pin: ModelPin, shape: Shape, micro: int, accumulation: int, blocks: tuple[int, ...]) -> dict[str, Any]:
    """Return the peak bytes of a real step: tensors that stay, and the most handed out beside them.

    Where weights are spread, the dearest of as many real gloo ranks.
    """
    if shape.shards == 1:
        return measured_rank(0, None, pin, shape, micro, accumulation, blocks)
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        home, processes = Path(name), []
        for rank in range(shape.shards):
            given = (rank, home, pin, shape, micro, accumulation, blocks)
            processes.append(fork.Process(target=measured_rank, args=given))
            processes[-1].start()
        for process in processes:
            process.join()
        found = [json.loads((home / f"{rank}.json").read_text()) for rank in range(shape.shards)]
    return max(found, key=lambda each: each["bytes"])


def room_apart(like: Tensor, host: torch.device) -> Tensor:
    """Return room that torch's allocator does not know of: main memory beside a device, here on a CPU."""
    import torch

    return torch.frombuffer(bytearray(like.numel() * like.element_size()), dtype=like.dtype).view(like.shape)


def measured_rank(
    rank: int, home: Path | None, pin: ModelPin, shape: Shape, micro: int, accumulation: int, blocks: tuple[int, ...]
) -> dict[str, Any]:
    """Return what one rank takes, and write it to `home`, where the ranks meet; None is a rank of its own."""
    import numpy as np
    import torch

    from data_contracts.config import TrainConfig
    from stages.meter.memory import peak_resident_bytes, reset_peak, resident_bytes
    from stages.model.batch import Row, collate
    from stages.model.load import load_model
    from stages.model.shards import own, ranks, shard
    from stages.technique import offload
    from stages.technique.frozen import halve_frozen
    from stages.technique.recompute import blocks_of, recompute
    from stages.workers.group import Group

    if home is not None:
        meeting = f"file://{home}/meeting"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=shape.shards)
    torch.manual_seed(0)
    offload.room = room_apart
    model: Any = shape.technique.wrap(load_model(pin))
    halve_frozen(model, shape.precision)
    if home is not None:
        shard(model, blocks_of(model), ranks("cpu"))
    recompute(model, blocks)
    model.train()
    optimizer = shape.technique.optimizer(model, TrainConfig(), 1e-4, 0, shape.optimizer_states)
    mask = np.arange(shape.row_tokens) >= shape.row_tokens - shape.answers
    draw = np.random.default_rng(0)
    words = min(500, pin.vocabulary)
    rows = [Row(str(n), draw.integers(3, words, shape.row_tokens), mask) for n in range(micro)]
    window = [collate(rows) for _ in range(accumulation)]

    def step() -> None:
        optimizer.step(window, 1e-4, clip=1.0, precision=shape.precision, loss_chunks=shape.loss_chunks,
                       in_backward=shape.update_in_backward, host="cpu" if shape.offload_activations else None,
                       all_reduce=None if home is None else Group(rank, shape.shards).sum_)  # fmt: skip

    optimizer.stand()
    step()
    states = [own(value) for each in optimizer.stand().values() for value in each if shape.optimizer_states != "host"]
    stays = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
             for item in (*map(own, model.parameters()), *model.buffers(), *states)}  # fmt: skip
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = np.array([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())], dtype=np.int64)
    exact, before = reset_peak(), resident_bytes()
    step()
    handed_out = int(np.cumsum(sizes).max(initial=0))
    scratch = peak_resident_bytes() - before - handed_out if exact else 0
    found = {"bytes": sum(stays.values()) + handed_out, "scratch": max(0, scratch)}
    if home is not None:
        (home / f"{rank}.json").write_text(json.dumps(found))
        torch.distributed.destroy_process_group()
    return found


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
        for size in list(SIZES)[:1] if quick else SIZES:
            rows += compare(llama(home / size, **SIZES[size]), size)
        tried = [
            searched(llama(home / f"s{number}", **SIZES["3M"] | {"num_hidden_layers": layers, "hidden_size": hidden}),
                     20 if quick else 50, 2 if quick else 3)
            for number, (layers, hidden) in enumerate([(4, 192)] if quick else [(4, 192), (5, 96), (4, 384), (5, 240)])
        ]  # fmt: skip
        parts = capped(llama(home / "cap", **SIZES["20M"]))
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
