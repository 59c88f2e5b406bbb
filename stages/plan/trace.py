"""Trace the step that training runs: the same technique, optimizer and step function, on fake tensors.

The model is a fake one, so that any size is traced in seconds and a few megabytes; where it is spread over workers, so
are its first worker's collectives, with partners that are not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from data_contracts.config import TrainConfig
from data_contracts.records import ModelPin
from stages.meter.flops import FlopModel, plain_positions
from stages.model.batch import Answers, Row, TokenBatch, collate
from stages.model.loss import plain
from stages.model.packing import collate_packed
from stages.model.shards import ranks, shard
from stages.plan.timeline import StorageWatch, Timeline
from stages.technique.base import Technique
from stages.technique.batch_selector import BatchSelector
from stages.technique.fake import fake_model
from stages.technique.looking import look_passes
from stages.technique.offload import HostAdamW
from stages.technique.recompute import blocks_of
from stages.technique.states import AdamW8bit, code_values
from stages.technique.step import States


@dataclass(frozen=True)
class Shape:
    """One way of training, all but how many rows and which blocks are recomputed: what is traced.

    `answers` is the number of supervised tokens of a row, at least 1 and a multiple of `loss_chunks`; everything is
    spread over `shards` workers; the rest are the plan's fields of these names.
    """

    technique: Technique
    precision: str
    row_tokens: int
    answers: int
    packed: bool
    optimizer_states: States = "float32"
    loss_chunks: int = 1
    update_in_backward: bool = False
    shards: int = 1
    offload_activations: bool = False


@lru_cache(maxsize=128)  # a later plan of the same run traces the same steps
def trace_step(
    pin: ModelPin,
    shape: Shape,
    train: TrainConfig,
    *,
    layers: int,
    rows: int,
    device: str,
    recomputed: tuple[int, ...] = (),
    host: str = "cpu",
) -> Timeline:
    """Run one optimizer step on a fake model of `layers` layers: over two micro-batches of `rows` rows, or over one
    where updates are made inside the backward pass. What is offloaded waits on `host`, and only `device` is watched."""
    if shape.optimizer_states == "8bit":
        code_values()  # made of real numbers
    window = 1 if shape.update_in_backward else 2
    mode = FakeTensorMode()
    model = fake_model(pin, shape.technique, shape.precision, layers=layers, device=device, mode=mode,
                       recomputed=recomputed)  # fmt: skip
    batch = _fake_batch(shape, rows, device, mode)
    whole = shape.technique.whole
    watch, blocks = StorageWatch(device, whole=whole), blocks_of(model) if whole else []
    with pretended(shape.shards, device) as mesh, mode, plain_positions():
        if mesh is not None:
            shard(model, blocks, mesh)
        optimizer = shape.technique.optimizer(model, train, 1e-3, 0, shape.optimizer_states)
        inner = getattr(optimizer, "adamw", None)
        for form in (inner, *getattr(inner, "forms", {}).values()):
            if isinstance(form, AdamW8bit):
                form.piece = 2**62  # pieces are views: the same bytes, traced once
        if isinstance(inner, HostAdamW):
            inner.host = torch.device(host)
        held = optimizer.stand()
        names = {parameter: name for name, parameter in model.named_parameters()}

        def states(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
            return [value for item in parameters for value in held.get(names.get(item, ""), ())]

        of_blocks = [
            (watch.own([*block.parameters(), *block.buffers()]), watch.own(states(block.parameters())))
            for block in blocks
        ]
        weights = watch.own([*model.parameters(), *model.buffers()]) + sum(size for size, _ in of_blocks)
        moments = watch.own(item for each in held.values() for item in each) + sum(size for _, size in of_blocks)
        watch.own(_tensors(batch))

        def step() -> None:
            optimizer.step(
                [batch] * window,
                1e-3,
                clip=train.clip,
                precision=shape.precision,
                loss_chunks=shape.loss_chunks,
                in_backward=shape.update_in_backward,
                host=host if shape.offload_activations else None,
            )

        if mesh is not None:  # an operator on spread tensors is tried on others when it comes for the first time
            with StorageWatch(device).following(plain(model).base_model, blocks):
                step()
        with watch.following(plain(model).base_model, blocks):
            step()
    return watch.timeline(weights, moments, of_blocks)


@lru_cache(maxsize=16)
def trace_flops(
    pin: ModelPin, shape: Shape, *, layers: int, device: str, recomputed: tuple[int, ...] = ()
) -> FlopModel:
    """Return the operations of training a model of `layers` layers in this way, a window's mean over a long training.

    The mean is not rounded: it is linear in depth as it is.
    """
    mode = FakeTensorMode()
    model = fake_model(pin, shape.technique, shape.precision, layers=layers, device=device, mode=mode,
                       recomputed=recomputed)  # fmt: skip
    with mode:
        optimizer = shape.technique.optimizer(model, TrainConfig(), 1e-3, 0)
        return FlopModel.mean([optimizer.price(window) for window in optimizer.cycle()])


@lru_cache(maxsize=16)
def trace_look(
    pin: ModelPin, shape: Shape, selector: BatchSelector, *, layers: int, device: str, recomputed: tuple[int, ...] = ()
) -> FlopModel:
    """Return the operations of looking at rows with `selector`, on a model of `layers` layers."""
    mode = FakeTensorMode()
    model = fake_model(pin, shape.technique, shape.precision, layers=layers, device=device, mode=mode,
                       recomputed=recomputed)  # fmt: skip
    with mode:
        return look_passes(model, selector.read(model))


@contextmanager
def pretended(ranks_: int, device: str) -> Iterator[DeviceMesh | None]:
    """Give the mesh of so many ranks, of which this process is the first and the others do not exist; None for one."""
    if ranks_ == 1:
        yield None
        return
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks_)
    try:
        yield ranks(device)
    finally:
        distributed.destroy_process_group()


@contextmanager
def seeded() -> Iterator[None]:
    """Leave torch's generator as it was: wrapping draws initial values."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _fake_batch(shape: Shape, rows: int, device: str, mode: FakeTensorMode) -> TokenBatch:
    mask = np.zeros(shape.row_tokens, dtype=bool)
    mask[shape.row_tokens - shape.answers :] = True
    row = Row("row", np.zeros(shape.row_tokens, dtype=np.int64), mask)
    batch = collate_packed([[row]] * rows) if shape.packed else collate([row] * rows)
    found = batch.answers

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    return TokenBatch(
        fake(batch.input_ids_BT),
        fake(batch.answer_BT),
        fake(batch.attention_BT),
        fake(batch.positions_BT),
        fake(batch.document_BT),
        batch.example_ids,
        fake(batch.weights_D),
        batch.packed,
        [Answers(fake(found.source_N), fake(found.label_N), fake(found.document_N))],
    )


def _tensors(batch: TokenBatch) -> list[torch.Tensor]:
    found = batch.answers
    return [
        batch.input_ids_BT,
        batch.answer_BT,
        batch.attention_BT,
        batch.positions_BT,
        batch.document_BT,
        batch.weights_D,
        found.source_N,
        found.label_N,
        found.document_N,
    ]
