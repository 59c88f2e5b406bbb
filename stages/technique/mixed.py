"""Windows read two ways: short rows by backward passes, long ones along a drawn direction by forward passes alone.

A micro-batch whose padded length is above `long_tokens` keeps no activations: its rows give the slope g₀ along z, the
others the gradient g₁, both means over their answer tokens, both clipped. Without `long_tokens` every row takes part in
both. What is done with the two is the technique's; `Addax` is plain descent: θ ← θ − lr·(α g₀ z + (1 − α) g₁).
Source: Li et al. 2024 (Addax, arXiv 2410.06441), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from stages.meter.flops import FlopModel
from stages.model.batch import TokenBatch
from stages.technique.gaussian import Gaussian
from stages.technique.optimizer import How, Optimizer, set_rate
from stages.technique.step import StepResult, optimizer_step, trainable
from stages.technique.zeroth import ZerothOrder

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig


def both_ways(
    model: nn.Module, inner: torch.optim.Optimizer, probe: ZerothOrder, window: Sequence[TokenBatch], how: How,
    long_tokens: float | None,
) -> tuple[StepResult, bool, float | None]:  # fmt: skip
    """Step `inner` on the gradient of the short rows and read `probe`'s slope on the long ones, before it.

    Returns:
        The window's result, its documents in the window's order; whether `inner` moved the weights; the clipped slope
        to descend along, None where there is none to be applied.
    """
    apart = [long_tokens is not None and batch.shape[1] > long_tokens for batch in window]
    near = [batch for batch, long in zip(window, apart, strict=True) if not long]
    far = [batch for batch, long in zip(window, apart, strict=True) if long or long_tokens is None]
    slope, side = probe.slope(far, how)
    whole = side.applied or not side.answer_tokens
    if near or how.get("all_reduce") is not None:
        mover = inner if whole else _Idle(trainable(model).values())
        result = optimizer_step(model, cast(torch.optim.Optimizer, mover), near, **how)
    else:
        result = _nothing(side)
    moved = whole and result.applied
    applied = moved or (side.applied and not result.answer_tokens)
    found = replace(_joined(window, apart, result, side, long_tokens is not None), applied=applied)
    if not (applied and side.applied):
        return found, moved, None
    return found, moved, slope * min(1.0, how["clip"] / (abs(slope) + 1e-6))


class Addax(Optimizer):
    """Plain descent along the gradient of short rows and the slope of long ones; nothing but a seed is kept.

    Args:
        model: what trains has `requires_grad`.
        train: weight decay is taken from it.
        share: α.
        epsilon: how far weights are moved to read the slope.
        seed: of the directions.
        long_tokens: padded length above which rows are read by forward passes alone; None reads every row both ways.
    """

    def __init__(
        self, model: nn.Module, train: TrainConfig, *, share: float, epsilon: float, seed: int, long_tokens: int | None
    ) -> None:
        super().__init__(model)
        self.share, self.long_tokens = share, long_tokens
        self.probe = Gaussian(model, train, epsilon, seed)
        groups = [{"params": [item], "weight_decay": train.weight_decay if item.ndim >= 2 else 0.0}
                  for item in trainable(model).values()]  # fmt: skip
        self.descent = torch.optim.SGD(groups, lr=0.0, foreach=False)

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one step; a part that no row of the window has is left out."""
        set_rate(self.descent, (1 - self.share) * rate)
        self.probe.windows = self.windows
        result, moved, slope = both_ways(self.model, self.descent, self.probe, window, how, self.long_tokens)
        if slope is not None:
            self.probe.descend(slope, self.share * rate)
        self.windows, self.updates = self.windows + 1, self.updates + (moved or slope is not None)
        return result

    def plain(self) -> dict[str, Any]:
        """Add the seed of the directions."""
        return super().plain() | {"seed": self.probe.seed}

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on with the same directions."""
        super().restore(plain, tensors)
        self.probe.seed = int(plain["seed"])

    def stand(self) -> dict[str, list[Tensor]]:
        """Return nothing: a seed and a number are all that is kept."""
        return {}

    def price(self, window: int) -> FlopModel:
        """Return a training pass for short rows, two forward passes for long ones; without a limit all three."""
        one = super().price(window)
        return one.probing(2) if self.long_tokens is None else replace(one, forward_above=self.long_tokens)


class _Idle:
    """Stands for an optimizer in `optimizer_step` where only a window's losses are asked for."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def step(self) -> None:
        """Move nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for parameter in self._parameters:
            parameter.grad = None


def _nothing(like: StepResult) -> StepResult:
    """Return what a step over no rows shows."""
    return StepResult(0.0, 0.0, like.document_loss_D[:0], like.document_tokens_D[:0], math.nan, None, False)


def _joined(
    window: Sequence[TokenBatch], apart: Sequence[bool], near: StepResult, far: StepResult, split: bool
) -> StepResult:
    """Return one result with documents in the window's order; where rows are not split, `near` has them all."""
    if not split:
        return near
    parts = {
        long: [found.document_loss_D.double(), found.document_tokens_D] for long, found in ((False, near), (True, far))
    }
    losses, counts = [parts[False][0][:0]], [parts[False][1][:0]]
    for batch, long in zip(window, apart, strict=True):
        count = len(batch.example_ids)
        for place, into in enumerate((losses, counts)):
            into.append(parts[long][place][:count])
            parts[long][place] = parts[long][place][count:]
    return replace(
        near,
        loss_sum=near.loss_sum + far.loss_sum,
        answer_tokens=near.answer_tokens + far.answer_tokens,
        document_loss_D=torch.cat(losses),
        document_tokens_D=torch.cat(counts),
        gradient_norm=near.gradient_norm if near.answer_tokens else far.gradient_norm,
    )
