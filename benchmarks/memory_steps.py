"""A real optimizer step and what it takes: the measure that a plan's prediction is held against.

The second step, after a first that makes the moments, runs under torch's profiler, whose allocation events give every
byte that torch's allocator hands out; what stands all the time (weights, buffers, moments) is added from the tensors
themselves. Scratch that the kernels' library takes past the allocator is not among them: it is bounded by what the
resident size grew more than the events say, and stated apart.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from data_contracts.records import ModelPin
    from stages.plan.trace import Shape


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
