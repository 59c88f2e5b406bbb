"""Directional derivatives of losses by finite difference: forward passes alone, no activation kept, nothing hooked.

The derivative of a loss ℓ along d is [ℓ(θ + εd) − ℓ(θ − εd)] / 2ε up to ε² and to rounding / ε; one-sided it takes the
loss at θ once for all directions, with an error of ε. Weights are written from a saved copy, so that none drifts and
all come back bit for bit. Source: Malladi et al. 2023 (MeZO).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.model.batch import TokenBatch
from stages.model.loss import logit_chunk, token_losses

STEPS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Steps worth trying, as ε‖d‖ / ‖θ‖ over the weights that d moves: small ones drown in rounding, large ones are not
linear."""


@dataclass
class Differences:
    """Directional derivatives of the summed answer losses of a batch's documents, by forward passes alone.

    Attributes:
        directions: by parameter name, (J, *parameter.shape); parameters that are not named stay where they are.
        central: whether both θ + εd and θ − εd are evaluated, or θ + εd and θ.
        step_J: ε‖d‖ / ‖θ‖ of each group.
    """

    model: Any
    directions: dict[str, Tensor]
    autocast: torch.dtype | None
    central: bool

    def __post_init__(self) -> None:
        named = dict(self.model.named_parameters())
        self._moved = [(named[name], direction) for name, direction in self.directions.items()]
        weights = sum(float(value.detach().double().square().sum()) for value, _ in self._moved) ** 0.5
        self.groups = len(self._moved[0][1])
        self._unit_J = [
            weights / max(1e-300, sum(float(d[j].double().square().sum()) for _, d in self._moved) ** 0.5)
            for j in range(self.groups)
        ]
        self.step_J = [STEPS[0]] * self.groups
        self._keep()

    def _keep(self) -> None:
        self._saved = [parameter.detach().clone() for parameter, _ in self._moved]

    @property
    def passes(self) -> int:
        """Forward passes that one batch takes."""
        return 2 * self.groups if self.central else self.groups + 1

    def extra_flops(self, batch: TokenBatch) -> int:
        """Return the operations beyond those of `passes` forward passes over `batch`."""
        return 0

    def of(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return product_DJ (float64), loss_sum_D (central: the mean of both sides, off by ε²) and answer_tokens_D."""
        here_N = None if self.central else self._losses(batch)
        columns, middle_N = [], here_N
        for group in range(self.groups):
            epsilon = self.step_J[group] * self._unit_J[group]
            if here_N is None:
                ahead_N, behind_N = self._both(batch, group, epsilon)
                middle_N = (ahead_N + behind_N) / 2 if middle_N is None else middle_N
                columns.append((ahead_N - behind_N) / (2 * epsilon))
            else:
                columns.append((self._moved_losses(batch, group, epsilon) - here_N) / epsilon)
        assert middle_N is not None
        owner_N, documents = batch.answers.document_N, len(batch.example_ids)
        slope_NJ = torch.stack(columns, dim=1)
        product_DJ = slope_NJ.new_zeros(documents, self.groups).index_add_(0, owner_N, slope_NJ)
        loss_D = middle_N.new_zeros(documents).index_add_(0, owner_N, middle_N)
        return product_DJ, loss_D, torch.bincount(owner_N, minlength=documents)

    def _both(self, batch: TokenBatch, group: int, epsilon: float) -> tuple[Tensor, Tensor]:
        """Return loss_N at θ + εd and at θ − εd."""
        return self._moved_losses(batch, group, epsilon), self._moved_losses(batch, group, -epsilon)

    def _moved_losses(self, batch: TokenBatch, group: int, epsilon: float) -> Tensor:
        with self._at(group, epsilon):
            return self._losses(batch)

    def _losses(self, batch: TokenBatch) -> Tensor:
        """Return the loss of each answer token in float64: differences are taken before anything is summed."""
        device, chunk = batch.input_ids_BT.device.type, logit_chunk(self.model)
        with torch.no_grad(), torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
            return token_losses(self.model, batch, chunk_tokens=chunk).double()

    @contextmanager
    def _at(self, group: int, epsilon: float) -> Iterator[None]:
        """Stand at θ + epsilon·d; on leaving, whatever happened, every weight is again what it was, bit for bit."""
        try:
            with torch.no_grad():
                for (parameter, direction), saved in zip(self._moved, self._saved, strict=True):
                    parameter.copy_(torch.add(saved, direction[group].to(saved.dtype), alpha=epsilon))
            yield
        finally:
            with torch.no_grad():
                for (parameter, _), saved in zip(self._moved, self._saved, strict=True):
                    parameter.copy_(saved)
