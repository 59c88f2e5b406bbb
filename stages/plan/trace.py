"""Trace the step that training runs: the same technique, optimizer and step function, on fake tensors.

The model is built on the meta device, wrapped by its technique there, and then given fake storage on the device planned
for, so that a model of any size is traced in seconds and a few megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from data_contracts.config import TrainConfig
from data_contracts.records import ModelPin
from stages.meter.flops import FlopModel, plain_positions
from stages.model.batch import Answers, Row, TokenBatch, collate
from stages.model.load import empty_model
from stages.model.loss import plain
from stages.model.packing import collate_packed
from stages.plan.timeline import StorageWatch, Timeline
from stages.technique.base import Technique


@dataclass(frozen=True)
class Shape:
    """One way of training, all but how many rows: what is traced.

    `answers` is the number of supervised tokens of a row, at least 1.
    """

    technique: Technique
    precision: str
    checkpoint_activations: bool
    row_tokens: int
    answers: int
    packed: bool


@lru_cache(maxsize=128)  # a later plan of the same run traces the same steps
def trace_step(pin: ModelPin, shape: Shape, train: TrainConfig, *, layers: int, rows: int, device: str) -> Timeline:
    """Run one optimizer step over two micro-batches of `rows` rows on a fake model of `layers` layers."""
    mode = FakeTensorMode()
    model = fake_model(pin, shape, layers=layers, device=device, mode=mode)
    batch = _fake_batch(shape, rows, device, mode)
    watch = StorageWatch()
    with mode, plain_positions():
        optimizer = shape.technique.optimizer(model, train, 1e-3, 0)
        moments = watch.own(optimizer.stand())
        weights = watch.own([*model.parameters(), *model.buffers()])
        watch.own(_tensors(batch))
        with watch.following(plain(model).base_model):
            optimizer.step([batch, batch], 1e-3, clip=train.clip, precision=shape.precision)
    return watch.timeline(weights, moments)


@lru_cache(maxsize=16)
def trace_flops(pin: ModelPin, shape: Shape, *, layers: int, device: str) -> FlopModel:
    """Return the operations of training a model of `layers` layers in this way, a window's mean over a long training.

    The mean is not rounded: it is linear in depth as it is.
    """
    mode = FakeTensorMode()
    model = fake_model(pin, shape, layers=layers, device=device, mode=mode)
    with mode:
        optimizer = shape.technique.optimizer(model, TrainConfig(), 1e-3, 0)
        return FlopModel.mean([optimizer.price(window) for window in optimizer.cycle()])


def fake_model(pin: ModelPin, shape: Shape, *, layers: int, device: str, mode: FakeTensorMode) -> Any:
    """Build, wrap and set up the model as training does, with fake storage on `device`."""
    model = shape.technique.wrap(empty_model(pin, layers=layers))
    if shape.checkpoint_activations:
        plain(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wanted = {name for name, item in model.named_parameters() if item.requires_grad}
    with mode:
        model._apply(lambda item: torch.empty(item.shape, dtype=item.dtype, device=device))
        plain(model).tie_weights()
    for name, item in model.named_parameters():
        item.requires_grad_(name in wanted)
    model.train()
    return model


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
