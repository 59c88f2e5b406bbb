"""A model as training sets it up, of fake tensors: shapes without data, to be traced instead of run.

It is built on the meta device, wrapped by its technique there, and then given fake storage on the device asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from data_contracts.records import ModelPin
from stages.model.load import empty_model
from stages.model.loss import plain
from stages.technique.base import Technique
from stages.technique.frozen import halve_frozen
from stages.technique.recompute import recompute


def fake_model(
    pin: ModelPin, technique: Technique, precision: str, *, device: str, mode: FakeTensorMode,
    layers: int | None = None, recomputed: tuple[int, ...] = (),
) -> Any:  # fmt: skip
    """Return the model in training mode; None for `layers` is all of them.

    Where it is wrapped torch's generator may be drawn from: keep its state around the call.
    """
    model: Any = technique.wrap(empty_model(pin, layers=layers))
    halve_frozen(model, precision)
    recompute(model, recomputed)
    wanted = {name for name, item in model.named_parameters() if item.requires_grad}
    with mode:
        model._apply(lambda item: torch.empty(item.shape, dtype=item.dtype, device=device))
        plain(model).tie_weights()
    for name, item in model.named_parameters():
        item.requires_grad_(name in wanted)
    return model.train()
