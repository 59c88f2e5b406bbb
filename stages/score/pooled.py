"""An example as one vector: the decoder's last hidden states, pooled over its tokens, at unit length.

One forward pass that stops before the output head. Shapes: D documents, T positions, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from data_contracts.errors import InputError
from stages.score.scorer import Given
from stages.score.target import target_batches

if TYPE_CHECKING:
    from torch import Tensor

    from stages.model.batch import TokenBatch

Weights = Literal["even", "position"]


def pooled(model: Any, batch: TokenBatch, weights: Weights, autocast: Any) -> Tensor:
    """Return unit_DH, float64, of a batch with one document a row; `position` weighs token t (from 1) by t / Σt."""
    import torch

    from stages.model.loss import hidden_states

    device = batch.input_ids_BT.device.type
    with torch.no_grad(), torch.autocast(device, dtype=autocast, enabled=autocast is not None):
        hidden_DTH = hidden_states(model, batch)
    weight_DT = batch.attention_BT.double()
    if weights == "position":
        weight_DT = weight_DT * (batch.positions_BT + 1)
    mean_DH = torch.einsum("dt,dth->dh", weight_DT, hidden_DTH.double())  # its length does not matter
    return torch.nn.functional.normalize(mean_DH, dim=1)


def pooled_target(given: Given, weights: Weights) -> list[Tensor]:
    """Return unit_RH of each target group's rows, each row once through the model, counted.

    Raises `InputError` where there is no target.
    """
    import torch

    assert given.trained is not None
    if given.target is None or not len(given.target):
        raise InputError("a target with at least one row", "it has none", "name files under `data.target`")
    rows, found = np.arange(len(given.target)), []
    ids: list[str] = []
    for batch in target_batches(given, rows):
        found.append(pooled(given.trained.model, batch, weights, given.autocast))
        ids += batch.example_ids
        given.meter.decoder(batch)
    place = {example_id: index for index, example_id in enumerate(ids)}
    order = torch.tensor([place[example_id] for example_id in given.target.ids.to_pylist()], device=given.device)
    unit_RH = torch.cat(found)[order]
    return [unit_RH[torch.as_tensor(members, device=given.device)] for members in given.members]
