"""TRAK's formula against dattri's, with nothing projected on either side: a small classifier, float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stages.score.methods.trak import Prepared, Trak
from stages.score.scorer import Meter

dattri_trak: Any = pytest.importorskip("dattri.algorithm.trak", reason="dattri is absent: pip install .[peers]")


class _Same:
    """A projector that changes nothing."""

    def __call__(self, gradient: Tensor, ensemble_id: int = 0) -> Tensor:
        return gradient


def test_trak_equals_dattris_with_the_same_features(monkeypatch: pytest.MonkeyPatch) -> None:
    from dattri.task import AttributionTask

    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    pool = TensorDataset(torch.randn(40, 5).double(), torch.randint(0, 3, (40,)))
    target = TensorDataset(torch.randn(7, 5).double(), torch.randint(0, 3, (7,)))

    def loss(parameters: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        given, label = data
        return nn.functional.cross_entropy(torch.func.functional_call(model, parameters, given[None]), label[None])

    def margin(parameters: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        said = -loss(parameters, data)
        return said - torch.log1p(-torch.exp(said))

    here = {name: value.detach() for name, value in model.named_parameters()}
    monkeypatch.setattr(dattri_trak, "random_project", lambda *_, **__: _Same())
    share, size = 0.05, sum(p.numel() for p in model.parameters())

    def feature(data: tuple[Tensor, Tensor]) -> np.ndarray:
        """Return φ = −∇loss / (1 − p), as the scorer forms it."""
        gradient = torch.func.grad(loss)(here, data)
        vector = torch.cat([value.flatten() for value in gradient.values()])
        return np.asarray((-vector / -torch.expm1(-loss(here, data))).detach())

    pool_NK, target_JK = (np.stack([feature(data) for data in split]) for split in (pool, target))
    doubt_N1 = np.array([[1 - float(torch.exp(-loss(here, data)))] for data in pool])
    method = Trak(dimensions=size, regularisation=share)
    parts = [pool_NK[:13], pool_NK[13:]]
    found = method.gather(parts, Prepared(None, None, Meter(), target_JK))  # type: ignore[arg-type]
    ours = np.concatenate([method.rescore(pool_NK[a:z], doubt_N1[a:z], found) for a, z in ((0, 13), (13, 40))])

    task = AttributionTask(loss_func=margin, model=model, checkpoints=model.state_dict())
    peer = dattri_trak.TRAKAttributor(
        task=task,
        correct_probability_func=lambda parameters, data: torch.exp(-loss(parameters, data)),
        regularization=share * float(np.square(pool_NK).sum()) / size / size,  # theirs divides gradients by √size
    )
    with torch.no_grad():
        theirs = peer.attribute(DataLoader(target, batch_size=3), DataLoader(pool, batch_size=8))
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=1e-9 * np.abs(ours).max())
