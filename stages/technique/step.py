"""The one optimizer step: `train` runs it, `plan` traces it.

A window of micro-batches gives the gradient of  sum_d w_d loss_d / sum_d w_d answer_tokens_d  over the whole window and
all ranks, whatever the micro-batches: sums are accumulated, summed over ranks and divided once. A step whose loss or
gradient is not finite is not applied. What the rows are and when to step is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stages.gradients.row_products import RowProducts
from stages.model.batch import TokenBatch
from stages.model.loss import document_losses
from stages.technique.noise import NormPair

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig

Moments = dict[str, tuple[Tensor, Tensor]]
AllReduce = Callable[[Sequence[Tensor]], None]
"""Sums each tensor over all ranks, in place, with the same bytes on every rank."""


@dataclass(frozen=True)
class StepResult:
    """What one window showed, before its update.

    Attributes:
        loss_sum: weighted answer losses of the window over all ranks, nats.
        answer_tokens: weighted answer tokens of the window over all ranks.
        document_loss_D: float32 or float64, unweighted loss sums of this rank's documents, in the order of its batches.
        document_tokens_D: int64, their answer tokens.
        gradient_norm: of the mean gradient, before clipping.
        norms: squared norms for the noise scale; None with fewer than two micro-batches or unequal weights.
        applied: whether the parameters were updated.
        document_product_D: float64, ⟨gradient of the document's unweighted loss sum, direction⟩ in the same order, NaN
            where the document's weight is 0; None where no products were asked for.
    """

    loss_sum: float
    answer_tokens: float
    document_loss_D: Tensor
    document_tokens_D: Tensor
    gradient_norm: float
    norms: NormPair | None
    applied: bool
    document_product_D: Tensor | None = None

    @property
    def loss(self) -> float | None:
        """The window's mean loss of an answer token, nats; None where no token counts."""
        return self.loss_sum / self.answer_tokens if self.answer_tokens > 0 else None


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train by name; a tied one stands once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def optimizer_for(model: nn.Module, train: TrainConfig, learning_rate: float) -> torch.optim.AdamW:
    """Return torch's AdamW over what trains; matrices decay by `train.weight_decay`, vectors (norms, biases) do not.

    One tensor at a time (neither foreach nor fused): the same bytes on every machine, and no second copy of the state.
    """
    parameters = list(trainable(model).values())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.epsilon,
        foreach=False,
        fused=False,
    )


def moments_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Moments:
    """Return (exp_avg, exp_avg_sq) of each trained parameter by name; zeros for one that was never updated."""
    moments: Moments = {}
    for name, parameter in trainable(model).items():
        state = optimizer.state.get(parameter, {})
        zero = None if state else torch.zeros_like(parameter)
        moments[name] = (zero, zero) if zero is not None else (state["exp_avg"], state["exp_avg_sq"])
    return moments


def load_moments(optimizer: torch.optim.Optimizer, model: nn.Module, moments: Mapping[str, tuple[Tensor, Tensor]],
                 updates: int) -> None:  # fmt: skip
    """Give moments (by parameter name) and the number of updates they have seen to `optimizer`, which takes them over.

    Raises KeyError for a trained parameter without moments: half a state would be neither a start nor a resume.
    """
    for name, parameter in trainable(model).items():
        average, square = moments[name]
        optimizer.state[parameter] = {
            "step": torch.tensor(float(updates)),
            "exp_avg": average.to(parameter.device, parameter.dtype),
            "exp_avg_sq": square.to(parameter.device, parameter.dtype),
        }


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Sequence[TokenBatch],
    *,
    clip: float,
    precision: str = "float32",
    all_reduce: AllReduce | None = None,
    chunk_tokens: int | None = None,
    products: RowProducts | None = None,
) -> StepResult:
    """Take one step of `optimizer` on this rank's share of a window.

    Args:
        model: in training mode.
        window: this rank's micro-batches, on the model's device; may be empty where other ranks hold the window.
        clip: largest norm of the mean gradient over all trained parameters.
        precision: "bfloat16" runs the forward pass under autocast; parameters, gradients and moments stay as they are.
        all_reduce: sums tensors over ranks in place; None for one rank.
        chunk_tokens: answer tokens through the output head at once; see `document_losses`.
        products: also reads each document's product with its direction from the backward passes.
    """
    parameters = list(trainable(model).values())
    device = parameters[0].device
    losses: list[Tensor] = []
    counts: list[Tensor] = []
    found: list[Tensor] = []
    totals = torch.zeros(5, dtype=torch.float64, device=device)  # loss, tokens, Σ|g_i|², Σ1/b_i, micro-batches
    with _accumulating(parameters) as gradient, products or nullcontext():
        for batch in window:
            if products is not None:
                products.begin(batch)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                loss_D, tokens_D = document_losses(model, batch, chunk_tokens=chunk_tokens)
            objective = (loss_D * batch.weights_D.to(loss_D.dtype)).sum()
            weight = (tokens_D * batch.weights_D.double()).sum()
            gradient.micro_square = torch.zeros((), dtype=torch.float64, device=device)
            objective.backward()
            if products is not None:
                found.append(products.take() / batch.weights_D)  # 0 / 0 is NaN: backward did not see the document
            losses.append(loss_D.detach())
            counts.append(tokens_D)
            one = weight.new_ones(())
            totals += torch.stack(
                [objective.detach().double(), weight, gradient.micro_square / weight**2, one / weight, one]
            )
    sums = gradient.sums(parameters)
    if all_reduce is not None:
        all_reduce([*sums, totals])
    loss_sum, tokens, small, inverse, micro = totals.tolist()
    square = torch.stack([torch.linalg.vector_norm(item).double() for item in sums]).square().sum()
    norm = math.sqrt(square.item()) / tokens if tokens > 0 else math.nan
    applied = math.isfinite(norm) and math.isfinite(loss_sum)
    if applied:
        factor = min(1.0, clip / (norm + 1e-6)) / tokens
        for parameter, item in zip(parameters, sums, strict=True):
            parameter.grad = item.mul_(factor)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    pair = NormPair(small / micro, inverse / micro, norm**2, 1 / tokens) if applied and micro >= 2 else None
    return StepResult(
        loss_sum,
        tokens,
        torch.cat(losses) if losses else torch.zeros(0, device=device),
        torch.cat(counts) if counts else torch.zeros(0, dtype=torch.int64, device=device),
        norm,
        pair if pair is None or math.isfinite(pair.small) else None,
        applied,
        torch.cat(found) if found else None,
    )


class _Gradient:
    """Running gradient sums. Each micro-batch's gradient is measured and added one parameter at a time, as backward
    produces it, so that its norm costs no second copy of all gradients."""

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}
        self.micro_square = torch.zeros((), dtype=torch.float64)

    def take(self, parameter: nn.Parameter) -> None:
        fresh = parameter.grad
        if fresh is None:
            return
        parameter.grad = None
        self.micro_square = self.micro_square + torch.linalg.vector_norm(fresh).double().square()
        known = self._sums.get(parameter)
        if known is None:
            self._sums[parameter] = fresh.detach()
        else:
            known.add_(fresh)

    def sums(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return one sum a parameter in order; zeros where no micro-batch reached it."""
        return [self._sums[item] if item in self._sums else torch.zeros_like(item) for item in parameters]


@contextmanager
def _accumulating(parameters: Sequence[nn.Parameter]) -> Iterator[_Gradient]:
    gradient = _Gradient()
    handles = [item.register_post_accumulate_grad_hook(gradient.take) for item in parameters]
    try:
        yield gradient
    finally:
        for handle in handles:
            handle.remove()
