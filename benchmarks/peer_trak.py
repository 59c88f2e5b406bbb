"""dattri's TRAK on our models and rows: the peer of benchmarks.fidelity. Imports dattri, so only where it is wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from dattri.algorithm.trak import TRAKAttributor
from dattri.task import AttributionTask
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader


def dattri_trak(
    checkpoints: list[Any], pool: list[Any], items: list[Any], dimensions: int, regularisation: float
) -> np.ndarray:
    """Return the attribution of every pool row to every item, (N, Z), averaged over the checkpoints.

    The function attributed is dattri's own for language models: log(p / (1 − p)) with p = exp(−mean answer-token loss).
    """
    model = checkpoints[0].model
    length = max(len(row.input_ids) for row in [*pool, *items])

    def mean_loss(parameters: Any, row: Any) -> Tensor:
        ids_T, answer_T = row
        asked = {"input_ids": ids_T[None], "use_cache": False}
        logits_TV = torch.func.functional_call(model, parameters, args=(), kwargs=asked).logits[0, :-1]
        loss_T = functional.cross_entropy(logits_TV, ids_T[1:], reduction="none")
        return (loss_T * answer_T[1:]).sum() / answer_T[1:].sum()

    def margin(parameters: Any, row: Any) -> Tensor:
        log_p = -mean_loss(parameters, row)
        return log_p - torch.log(-torch.expm1(log_p))

    def probability(parameters: Any, row: Any) -> Tensor:
        return torch.exp(-mean_loss(parameters, row))

    def loader(rows: list[Any]) -> DataLoader[Any]:
        padded = []
        for row in rows:
            ids_T, answer_T = torch.zeros(length, dtype=torch.int64), torch.zeros(length)
            ids_T[: len(row.input_ids)] = torch.from_numpy(row.input_ids)
            answer_T[: len(row.input_ids)] = torch.from_numpy(row.answer_mask).float()
            padded.append((ids_T, answer_T))
        return DataLoader(padded, batch_size=16, shuffle=False)  # type: ignore[arg-type]

    states = [{name: value.clone() for name, value in item.model.state_dict().items()} for item in checkpoints]
    task = AttributionTask(loss_func=margin, model=model, checkpoints=states)
    projector = {"proj_dim": dimensions, "proj_max_batch_size": 16, "device": "cpu"}
    attributor = TRAKAttributor(task, probability, projector_kwargs=projector, regularization=regularisation)
    attributor.cache(loader(pool))
    return np.asarray(attributor.attribute(loader(items)).detach().double())
