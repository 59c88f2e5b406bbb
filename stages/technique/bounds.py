"""What a step may at most show to be applied, and how far it then moved: what the trainer's guard asks of a step.

Update over weight and the loss that an update promises are read from up to 256 numbers a tensor, evenly spread, so that
no second copy of the weights stands beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from stages.model.shards import own
from stages.technique.attempt import AllReduce

SAMPLE = 256


class Bounds:
    """Bounds of one window, and what its update did.

    Args:
        most_loss: nats an answer token, above which the window is not applied.
        most_norm: of the gradient before clipping, above which it is not.
    """

    def __init__(self, most_loss: float = math.inf, most_norm: float = math.inf) -> None:
        self._most_loss, self._most_norm = most_loss, most_norm
        self._sums: Tensor | None = None

    def allow(self, loss: float, norm: float) -> bool:
        """Return whether a window with this mean loss and gradient norm may be applied; one not finite may not."""
        return math.isfinite(loss) and math.isfinite(norm) and loss <= self._most_loss and norm <= self._most_norm

    @contextmanager
    def measured(self, parameters: Sequence[Tensor], factor: float = 1.0) -> Iterator[None]:
        """Measure the update that is made inside.

        Args:
            parameters: that it may move; with gradients where there are such.
            factor: on the window's mean gradient in those gradients, from clipping.
        """
        parameters = [item for item in parameters if own(item).is_contiguous()]  # others stand for what lies elsewhere
        with torch.no_grad():
            before = [_sample(item).to(torch.float64, copy=True) for item in parameters]
            slopes = [None if item.grad is None else _sample(item.grad).double() / factor for item in parameters]
        yield
        with torch.no_grad():
            for item, old, slope in zip(parameters, before, slopes, strict=True):
                step = _sample(item).double() - old
                taken = own(item).numel() / max(1, old.numel()) * step.ne(0).any()
                kept = step.new_zeros(()) if slope is None else -(step * slope).sum()
                sums = taken * torch.stack([step.square().sum(), old.square().sum(), kept])
                self._sums = sums if self._sums is None else self._sums + sums

    def add_up(self, all_reduce: AllReduce) -> None:
        """Add what every rank measured of its own part, where weights are spread over ranks."""
        if self._sums is not None:
            all_reduce([self._sums])

    def promise(self, nats: float) -> None:
        """Say what the measured update promised, where it followed no gradients."""
        if self._sums is not None:
            self._sums[2] = nats

    def told(self) -> tuple[float | None, float | None]:
        """Return (norm of the update over that of the weights it moved, loss it promised to take off in nats)."""
        if self._sums is None:
            return None, None
        step, weight, slope = self._sums.tolist()
        return (math.sqrt(step / weight), slope) if step > 0 and weight > 0 else (None, None)


def _sample(tensor: Tensor) -> Tensor:
    """Return up to `SAMPLE` numbers of this rank's part, evenly spread over the tensor's order."""
    flat = own(tensor.detach()).reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLE) | 1]  # odd, so that it is not the same columns of every row
