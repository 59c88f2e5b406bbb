"""Adam in a low-rank space: GaLore steps in the gradient's leading directions, APOLLO reads scales off a random one.

For a matrix of gradient G (m, n) with m ≤ n (else transposed), R = PᵀG of shape (r, n) has Adam's moments; all that is
not such a matrix has plain AdamW. GaLore: P are the leading r left singular vectors of G, anew every `gap` updates, and
W moves along scale · P · Adam(R). APOLLO: P is Gaussian with variance 1/r, drawn again from a seed and never kept, and
W moves along √scale · G with column j stretched by ‖Adam(R)_j‖ / ‖R_j‖ (one stretch for all with `tensor_wise`), its
norm growing by at most 1.01 an update.
Sources: Zhao et al. 2024 (GaLore, arXiv 2403.03507), algorithm 2; Zhu et al. 2024 (APOLLO, arXiv 2412.05270),
algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from stages.meter.flops import FlopModel
from stages.meter.linear_algebra import svd_flops
from stages.model.batch import TokenBatch
from stages.model.loss import plain
from stages.technique.optimizer import How, Optimizer, set_rate
from stages.technique.step import StepResult, optimizer_step, trainable
from stages.technique.zeroth import drawn

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig

GROWTH = 1.01
Kind = Literal["galore", "apollo"]


def matrices_of(model: nn.Module, rank: int) -> dict[str, nn.Parameter]:
    """Return the trained weights of linear layers but the head whose smaller side is above `rank`."""
    head = plain(model).get_output_embeddings()
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear) and module is not head}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name: item
        for name, item in trainable(model).items()
        if id(item) in linear and id(item) not in embeddings and min(item.shape) > rank
    }


class LowRankAdam(torch.optim.Optimizer):
    """The update; `state` of a parameter is named tensors. Vectors and matrices that are not projected have AdamW."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], projected: Mapping[str, nn.Parameter], train: TrainConfig, *,
        kind: Kind, rank: int, gap: int, scale: float, tensor_wise: bool, seed: int,
    ) -> None:  # fmt: skip
        super().__init__(list(named.values()), {"lr": 0.0})
        self.named, self.projected, self._train = dict(named), set(projected), train
        self.kind, self.rank, self.gap, self.scale, self.tensor_wise, self.seed = (
            kind,
            rank,
            gap,
            scale,
            tensor_wise,
            seed,
        )
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rate = self.param_groups[0]["lr"]
        self.updates += 1
        for name, weight in self.named.items():
            if weight.grad is None:
                continue
            if self._train.weight_decay and weight.ndim >= 2:
                weight.mul_(1 - rate * self._train.weight_decay)
            if name not in self.projected:
                weight.add_(self._adam(name, weight.grad), alpha=-rate)
                continue
            flat = weight.shape[0] <= weight.shape[1]
            grad_mn, weight_mn = (weight.grad, weight) if flat else (weight.grad.T, weight.T)
            weight_mn.add_(getattr(self, f"_{self.kind}")(name, grad_mn), alpha=-rate)

    def _adam(self, name: str, gradient: Tensor) -> Tensor:
        """Return Adam's normalised update of `gradient`, the moments kept by the parameter's name."""
        state, train = self.state[self.named[name]], self._train
        if "first" not in state:
            state["first"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        first = state["first"].mul_(train.beta1).add_(gradient, alpha=1 - train.beta1)
        second = state["second"].mul_(train.beta2).addcmul_(gradient, gradient, value=1 - train.beta2)
        root = (second / (1 - train.beta2**self.updates)).sqrt_().add_(train.epsilon)
        return (first / (1 - train.beta1**self.updates)).div_(root)

    def _galore(self, name: str, grad_mn: Tensor) -> Tensor:
        state = self.state[self.named[name]]
        if "basis" not in state or (self.updates - 1) % self.gap == 0:
            state["basis"] = leading(grad_mn, self.rank, state.get("basis"))
        basis_mr = state["basis"]
        return basis_mr @ self._adam(name, basis_mr.T @ grad_mn).mul_(self.scale)

    def _apollo(self, name: str, grad_mn: Tensor) -> Tensor:
        state = self.state[self.named[name]]
        shape, period = (self.rank, grad_mn.shape[0]), (self.updates - 1) // self.gap
        low_rn = drawn(shape, grad_mn, self.seed, period, name).div_(math.sqrt(self.rank)) @ grad_mn
        dims = None if self.tensor_wise else 0
        before = torch.linalg.vector_norm(low_rn, dim=dims)
        after = torch.linalg.vector_norm(self._adam(name, low_rn), dim=dims)
        found = grad_mn * (math.sqrt(self.scale) * after / before.clamp_min(1e-30))
        norm = torch.linalg.vector_norm(found)
        known = state.get("norm")
        if known is not None:
            limit = torch.where(known > 0, GROWTH * known / norm.clamp_min(1e-30), torch.ones_like(norm)).clamp_max_(1)
            found, norm = found.mul_(limit), norm * limit
        state["norm"] = norm
        return found


def leading(grad_mn: Tensor, rank: int, known: Tensor | None) -> Tensor:
    """Return the leading `rank` left singular vectors, shape (m, rank).

    Where the decomposition does not converge (or G is zero) the ones known stay; without any, unit vectors.
    """
    try:
        return torch.linalg.svd(grad_mn.float(), full_matrices=False)[0][:, :rank].to(grad_mn.dtype).contiguous()
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if known is not None:
            return known
        return torch.eye(grad_mn.shape[0], rank, dtype=grad_mn.dtype, device=grad_mn.device)


class Projected(Optimizer):
    """Steps of `LowRankAdam` over everything that trains."""

    def __init__(self, model: nn.Module, train: TrainConfig, *, kind: Kind, rank: int, gap: int, scale: float,
                 tensor_wise: bool, seed: int) -> None:  # fmt: skip
        super().__init__(model)
        self._projected = matrices_of(model, rank)
        self.adam = LowRankAdam(
            trainable(model), self._projected, train, kind=kind, rank=rank, gap=gap, scale=scale,
            tensor_wise=tensor_wise, seed=seed,
        )  # fmt: skip

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one step."""
        set_rate(self.adam, rate)
        result = optimizer_step(self.model, self.adam, window, **how)
        self.windows, self.updates = self.windows + 1, self.updates + result.applied
        return result

    def plain(self) -> dict[str, Any]:
        """Add the seed of the projections."""
        return super().plain() | {"seed": self.adam.seed}

    def tensors(self) -> dict[str, Tensor]:
        """Return bases, moments and norms, as `low.PART.NAME`; they are no moments of the parameters' own shape."""
        named = self.adam.named.items()
        return {f"low.{part}.{name}": value for name, item in named for part, value in self.adam.state[item].items()}

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take them over."""
        super().restore(plain, tensors)
        self.adam.seed, self.adam.updates = int(plain["seed"]), self.updates
        self.adam.state.clear()
        for key, value in tensors.items():
            _, part, name = key.split(".", 2)
            item = self.adam.named[name]
            self.adam.state[item][part] = value.to(item.device)

    def stand(self) -> dict[str, list[Tensor]]:
        """Put zero state in place, before an update that makes its bases anew; return it."""
        rank = self.adam.rank
        for name, item in self.adam.named.items():
            state = self.adam.state[item]
            shape = tuple(item.shape)
            if name in self._projected:
                small, large = sorted(shape)
                shape = (rank, large)
                if self.adam.kind == "galore":
                    state["basis"] = item.new_zeros(small, rank)
                else:
                    state["norm"] = item.new_zeros(())
            state["first"], state["second"] = item.new_zeros(shape), item.new_zeros(shape)
        return {name: list(self.adam.state[item].values()) for name, item in self.adam.named.items()}

    def price(self, window: int) -> FlopModel:
        """Return the passes, the projections and, where a basis is made anew, its singular vectors."""
        galore = self.adam.kind == "galore"
        one = sum(2 * (1 + galore) * item.numel() * self.adam.rank for item in self._projected.values())
        if galore and window % self.adam.gap == 0:
            one += sum(svd_flops(*item.shape) for item in self._projected.values())
        return replace(super().price(window), update=Fraction(one))

    def cycle(self) -> Sequence[int]:
        """Return the windows of one basis."""
        return range(self.adam.gap) if self.adam.kind == "galore" else (0,)
