"""Small models and windows for techniques, and a life that is interrupted after any window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_contracts.config import ModelConfig, TrainConfig
from data_contracts.method import resolve
from data_contracts.records import ModelPin
from stages.model.batch import Row, TokenBatch, collate
from stages.model.load import load_model, pin_model
from stages.technique.base import Technique
from stages.technique.optimizer import Optimizer
from stages.train.snapshot import Snapshots
from stages.workers.group import Group
from tests.stages.train.small import VOCABULARY, token_columns

TRAIN = TrainConfig(weight_decay=0.1)


def technique(method: str, **settings: Any) -> Technique:
    """Return a technique by name."""
    return resolve(Technique, {"method": method, **settings}, "test")


def llama(layers: int = 3, *, seed: int = 0, dtype: torch.dtype = torch.float32, hidden: int = 16) -> Any:
    """Return a random Llama of `layers` layers with tied embeddings; in float64 with torch's own norms."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=None, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    if dtype == torch.float64:
        for name, module in list(model.named_modules()):
            if type(module).__name__ == "LlamaRMSNorm":
                model.set_submodule(name, torch.nn.RMSNorm(hidden, eps=module.variance_epsilon, dtype=dtype))
    return model


def pinned(folder: Path, layers: int = 3, hidden: int = 16) -> ModelPin:
    """Write such a model without a tokenizer's files beside it and pin it."""
    from tests.stages.train.small import write_model

    write_model(folder)  # its tokenizer
    llama(layers, hidden=hidden).save_pretrained(folder)
    return pin_model(ModelConfig(path=folder.name), folder.parent)


def rows(count: int, seed: int = 5, longest: int = 20) -> list[Row]:
    """Return random rows."""
    columns = token_columns(count, seed, longest=longest)
    named = zip(columns["example_id"], columns["input_ids"], columns["answer_mask"], strict=True)
    return [Row(name, np.array(ids), np.array(mask)) for name, ids, mask in named]


def windows(count: int, seed: int = 0) -> list[list[TokenBatch]]:
    """Return windows of two micro-batches of two rows each."""
    found = rows(4 * count, seed)
    return [[collate(found[at : at + 2]), collate(found[at + 2 : at + 4])] for at in range(0, len(found), 4)]


def started(method: Technique, pin: ModelPin, seed: int = 7) -> Optimizer:
    """Return the optimizer of a freshly loaded model in training mode."""
    torch.manual_seed(1)
    model = method.wrap(load_model(pin)).train()
    return method.optimizer(model, TRAIN, 1e-2, seed)


def life(method: Technique, pin: ModelPin, count: int, *, killed_after: int | None, folder: Path) -> Optimizer:
    """Take `count` windows; with `killed_after`, through a snapshot on disk into another process's objects."""
    optimizer = started(method, pin)
    for number, window in enumerate(windows(count)):
        if number == killed_after:
            snapshots = Snapshots(folder, "work")
            snapshots.write(
                1, optimizer, {"rng.cpu.0": torch.get_rng_state()}, {"position": {"best": None, "guard": {}}}, {}
            )
            optimizer = started(method, pin, seed=99)  # the seed is the snapshot's to say
            found = snapshots.latest()
            assert found is not None
            found.restore(optimizer, Group())
        optimizer.step(window, 1e-2, clip=1.0)
    return optimizer


def handed_out(work: Callable[[], object]) -> int:
    """Return the most that torch's allocator hands out at once while `work` runs, bytes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(sizes).max(initial=0))


def put_back(method: Technique, pin: ModelPin, folder: Path) -> None:
    """Put earlier states back into a living optimizer, and hold it against one that never knew what came after."""
    stream = windows(7)
    optimizer, snapshots = started(method, pin), Snapshots(folder, "work")
    for number, window in enumerate(stream):
        if number in (0, 2):
            state = {"position": {"best": None, "guard": {"states": [[0, None, 0]]}}}
            snapshots.write(number, optimizer, {"rng.cpu.0": torch.get_rng_state()}, state, {})
        optimizer.step(window, 1e-2, clip=1.0)
    for back in (2, 0):
        snapshots.at(back).put(optimizer, Group())
        fresh = started(method, pin, seed=99)
        snapshots.at(back).put(fresh, Group())
        for each in (optimizer, fresh):
            each.windows = 7  # rows go on, and with them whose turn it is
            each.step(stream[3], 1e-2, clip=1.0)
        assert optimizer.plain() == fresh.plain()
        ours, wanted = optimizer.model.state_dict(), fresh.model.state_dict()
        assert all(torch.equal(ours[name], value) for name, value in wanted.items())
        held, others = optimizer.held(), fresh.held()
        assert set(held) == set(others)
        assert all(torch.equal(held[name], value) for name, value in others.items())
