"""Adam's preconditioner and the mean gradient that it is applied to.

D = 1 / (√v̂ + ε) with v̂ = v / (1 − β₂ᵘ), u updates (Kingma & Ba 2015, algorithm 1). Since ⟨D gᵢ, Ḡ⟩ = ⟨gᵢ, D Ḡ⟩,
only the target's mean gradient Ḡ is preconditioned, elementwise and exactly; per-example gradients never are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from data_contracts.errors import ArtifactError, InputError
from stages.model.batch import TokenBatch
from stages.model.loss import document_losses, logit_chunk


def mean_gradient(
    model: nn.Module, batches: Iterable[TokenBatch], *, autocast: torch.dtype | None = None
) -> tuple[dict[str, Tensor], Tensor, int]:
    """Return the mean over examples of the gradient of each example's *mean* answer-token loss.

    Args:
        model: parameters with `requires_grad` are differentiated; `.grad` is used and left None.
        batches: every document is one example; on the model's device.
        autocast: dtype of the forward pass; gradients add up in the weights' dtype.

    Returns:
        gradient by parameter name (a parameter that the loss does not reach is absent), the examples' mean losses
        (nats an answer token, in the order met), and the number of examples.

    Raises `InputError` where an example has no token to predict: its loss would be 0 / 0.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    losses: list[Tensor] = []
    for parameter in named.values():
        parameter.grad = None
    for batch in batches:
        with torch.enable_grad():
            with torch.autocast(batch.input_ids_BT.device.type, dtype=autocast, enabled=autocast is not None):
                loss_sum_D, answer_tokens_D = document_losses(model, batch, chunk_tokens=logit_chunk(model))
            require_answers(batch)
            mean_D = loss_sum_D / answer_tokens_D
            mean_D.sum().backward()
        losses.append(mean_D.detach())
    count = sum(len(mean_D) for mean_D in losses)
    gradient = {name: parameter.grad / count for name, parameter in named.items() if parameter.grad is not None}
    for parameter in named.values():
        parameter.grad = None
    return gradient, torch.cat(losses), count


def require_answers(batch: TokenBatch) -> None:
    """Raise `InputError` where a document of `batch` has no token to predict: its mean loss would be 0 / 0."""
    counts_D = torch.bincount(batch.answers.document_N, minlength=len(batch.example_ids))
    empty = torch.nonzero(counts_D == 0).flatten().tolist()
    if empty:
        raise InputError(
            "every target example has an answer token to predict",
            f"{len(empty)} have no supervised token, the first is {batch.example_ids[empty[0]]}",
            "leave these rows out, or raise `ingest.longest_tokens` where the answer was cut away",
        )


def precondition(
    gradient: Mapping[str, Tensor],
    moments: Mapping[str, tuple[Tensor, Tensor]],
    updates: int,
    *,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> dict[str, Tensor]:
    """Return D Ḡ elementwise.

    Args:
        gradient: by parameter name.
        moments: (exp_avg, exp_avg_sq) by parameter name, as a checkpoint holds them.
        updates: optimizer updates that made them, at least 1.
        beta2, epsilon: the optimizer's.

    An element with v = 0 never had a gradient: nothing is known about its scale, and 1/ε would let it drown all others.
    It gets 0. Raises `ArtifactError` where a parameter with a gradient has no moment or one of another shape.
    """
    return {
        name: value / denominator(name, value, moments, updates, beta2=beta2, epsilon=epsilon)
        for name, value in gradient.items()
    }


def denominator(
    name: str,
    value: Tensor,
    moments: Mapping[str, tuple[Tensor, Tensor]],
    updates: int,
    *,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> Tensor:
    """Return √v̂ + ε of parameter `name` in the shape, dtype and place of `value`; infinite where v = 0.

    Raises as `precondition` does.
    """
    if updates < 1:
        raise ArtifactError("moments of at least one update", f"{updates} updates", "train first (the warm-up does)")
    second = moments.get(name, (None, None))[1]
    if second is None or second.shape != value.shape:
        raise ArtifactError(
            f"the checkpoint holds a second moment of {name}, shape {tuple(value.shape)}",
            "it has none" if second is None else f"it has shape {tuple(second.shape)}",
            "score from a checkpoint of the technique that is planned",
        )
    second = second.to(value.device, value.dtype)
    root = (second / (1.0 - beta2**updates)).sqrt_().add_(epsilon)
    return root.masked_fill_(second == 0, float("inf"))
