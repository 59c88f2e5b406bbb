"""Directions of the zeroth-order techniques: dense Gaussians, products of two thin ones, and those of a subspace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stages.meter.linear_algebra import qr_flops
from stages.technique.zeroth import ZerothOrder, drawn

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig

MOMENTUM = "momentum."


class Gaussian(ZerothOrder):
    """z ~ N(0, 1) for every number."""

    def moved(self, name: str, weight: Tensor, by: float) -> Tensor:
        """Return weight + by · z, in one tensor of its size."""
        return drawn(weight.shape, weight, self.seed, self.windows, name).mul_(by).add_(weight)

    def move(self, name: str, weight: Tensor, by: float) -> None:
        """Add by · z."""
        weight.add_(drawn(weight.shape, weight, self.seed, self.windows, name), alpha=by)


class LowRank(Gaussian):
    """z = U Vᵀ / √r for a matrix, U drawn each window and V kept for some; vectors as `Gaussian`.

    Perturbation and update ask for the same U and V of the window, also where V is new: drawing V anew in one of the
    two alone would move the weights along a direction whose slope was never read.

    Args:
        rank: r; at most the matrix's smaller side.
        interval: windows that V is kept.
        momentum: of U's coefficients (LOZO-M); 0 has none and keeps nothing.
    """

    def __init__(
        self, model: nn.Module, train: TrainConfig, epsilon: float, seed: int, *, rank: int, interval: int,
        momentum: float,
    ) -> None:  # fmt: skip
        super().__init__(model, train, epsilon, seed)
        self.rank, self.interval, self.momentum = rank, interval, momentum
        self._momenta: dict[str, Tensor] = {}
        self._expressed = 0  # the interval in whose V they are

    def factors(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return U_mr and V_nr of this window for a matrix of shape (m, n)."""
        rank = min(self.rank, *weight.shape)
        return (
            drawn((weight.shape[0], rank), weight, self.seed, self.windows, "U", name),
            self.kept_factor(name, weight, self.windows // self.interval),
        )

    def kept_factor(self, name: str, weight: Tensor, interval: int) -> Tensor:
        """Return V_nr of interval number `interval`."""
        rank = min(self.rank, *weight.shape)
        return drawn((weight.shape[1], rank), weight, self.seed, interval, "V", name)

    def moved(self, name: str, weight: Tensor, by: float) -> Tensor:
        """Return weight + by · z."""
        if weight.ndim != 2:
            return super().moved(name, weight, by)
        left_mr, right_nr = self.factors(name, weight)
        return torch.addmm(weight, left_mr, right_nr.T, alpha=by / math.sqrt(right_nr.shape[1]))

    def move(self, name: str, weight: Tensor, by: float) -> None:
        """Add by · z; with momentum, the running mean of by · U takes U's place."""
        if weight.ndim != 2:
            return super().move(name, weight, by)
        left_mr, right_nr = self.factors(name, weight)
        if self.momentum:
            mean_mr = self._momenta.setdefault(name, torch.zeros_like(left_mr))
            left_mr, by = mean_mr.mul_(self.momentum).add_(left_mr, alpha=(1 - self.momentum) * by), 1.0
        weight.addmm_(left_mr, right_nr.T, alpha=by / math.sqrt(right_nr.shape[1]))

    def renew(self) -> None:
        """Where V is new, express the momenta in it: N Vᵀ V' / n, for the old V and the new V' of n rows."""
        interval = self.windows // self.interval
        if interval == self._expressed:
            return
        for name, mean_mr in self._momenta.items():
            weight = self.named[name]
            old_nr, new_nr = (self.kept_factor(name, weight, number) for number in (self._expressed, interval))
            mean_mr.copy_(mean_mr @ (old_nr.T @ new_nr) / weight.shape[1])
        self._expressed = interval

    def thin_flops(self, weight: Tensor) -> int:
        """Return the operations of U Vᵀ."""
        return 2 * weight.numel() * min(self.rank, *weight.shape) if weight.ndim == 2 else 0

    def renewal_flops(self, window: int) -> int:
        """Return the operations of carrying the momenta over where V is new."""
        if not self.momentum or not window or window % self.interval:
            return 0
        matrices = [item for item in self.named.values() if item.ndim == 2]
        return sum(2 * sum(item.shape) * min(self.rank, *item.shape) ** 2 for item in matrices)

    def cycle(self) -> Sequence[int]:
        """Return the windows of one V."""
        return range(self.interval, 2 * self.interval) if self.momentum else (0,)

    def plain(self) -> dict[str, Any]:
        """Add the number of the V that the momenta are expressed in."""
        return super().plain() | {"expressed": self._expressed}

    def tensors(self) -> dict[str, Tensor]:
        """Return the momenta by parameter name."""
        return {MOMENTUM + name: value for name, value in self._momenta.items()}

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take the momenta over."""
        super().restore(plain, tensors)
        self._expressed = int(plain["expressed"])
        self._momenta = {
            name.removeprefix(MOMENTUM): value.to(self.named[name.removeprefix(MOMENTUM)].device)
            for name, value in tensors.items()
            if name.startswith(MOMENTUM)
        }

    def stand(self) -> dict[str, list[Tensor]]:
        """Put zero momenta in place and return them."""
        if self.momentum:
            self._momenta = {
                name: torch.zeros_like(item[:, : min(self.rank, *item.shape)], memory_format=torch.contiguous_format)
                for name, item in self.named.items()
                if item.ndim == 2
            }
        return {name: [value] for name, value in self._momenta.items()}


class Subspace(LowRank):
    """z = √(m n) / r · U Z Vᵀ for a matrix, U and V orthonormal and kept for some windows, Z Gaussian of r × r.

    The subspace is the QR factor of Gaussians that a seed draws again: nothing is kept. `interval` is U's and V's.
    """

    def __init__(
        self, model: nn.Module, train: TrainConfig, epsilon: float, seed: int, *, rank: int, interval: int
    ) -> None:
        super().__init__(model, train, epsilon, seed, rank=rank, interval=interval, momentum=0.0)

    def factors(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return √(m n / r) · U Z and V of this window: their product over √r is z."""
        rank, interval = min(self.rank, *weight.shape), self.windows // self.interval
        left_mr = orthonormal(drawn((weight.shape[0], rank), weight, self.seed, interval, "U", name))
        inner_rr = drawn((rank, rank), weight, self.seed, self.windows, "Z", name)
        return left_mr @ inner_rr.mul_(math.sqrt(weight.numel() / rank)), self.kept_factor(name, weight, interval)

    def kept_factor(self, name: str, weight: Tensor, interval: int) -> Tensor:
        """Return V of interval number `interval`."""
        return orthonormal(super().kept_factor(name, weight, interval))

    def thin_flops(self, weight: Tensor) -> int:
        """Return the operations of U Z Vᵀ and of the two thin QR factors."""
        if weight.ndim != 2:
            return 0
        rank = min(self.rank, *weight.shape)
        factors = sum(qr_flops(size, rank) for size in weight.shape)
        return super().thin_flops(weight) + 2 * weight.shape[0] * rank**2 + factors


def orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns, in their dtype."""
    exact = columns if columns.dtype == torch.float64 else columns.float()
    return torch.linalg.qr(exact).Q.to(columns.dtype)
