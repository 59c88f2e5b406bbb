"""The one optimizer step: `train` runs it, `plan` traces it.

A window of micro-batches gives the gradient of  sum_d w_d loss_d / sum_d w_d answer_tokens_d  over the whole window and
all ranks, whatever the micro-batches: sums are accumulated, summed over ranks and divided once. A step whose loss or
gradient is not finite is not applied. What the rows are and when to step is decided elsewhere, and so are the savings:
the head in chunks, moments in fewer bits, recomputed blocks, updates inside the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from data_contracts.errors import ConfigError
from stages.gradients.row_products import RowProducts
from stages.model.batch import TokenBatch
from stages.model.loss import chunk_of, document_losses
from stages.model.shards import own, placed, sharded
from stages.technique.accumulate import Gradient, accumulating, updating
from stages.technique.adam_mini import AdamMini, head_rows
from stages.technique.attempt import AllReduce, ShortOfMemoryError, generators, noted, restore
from stages.technique.bounds import Bounds
from stages.technique.noise import NormPair
from stages.technique.offload import HostAdamW, Offloading, room
from stages.technique.states import AdamW8bit, HeldAdamW
from stages.technique.states_4bit import AdamW4bit

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig

Moments = dict[str, tuple[Tensor, Tensor]]
States = Literal["float32", "8bit", "4bit", "mini", "host"]
"""In which AdamW holds its moments; "mini" is one second moment a block (Adam-mini), "host" float32 in main memory."""


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

    def of(self, documents: int) -> StepResult:
        """Return what the first documents alone show; those after them kept this rank's passes with the others'."""
        losses_D, tokens_D = self.document_loss_D[:documents], self.document_tokens_D[:documents]
        return replace(self, document_loss_D=losses_D, document_tokens_D=tokens_D)

    @property
    def loss(self) -> float | None:
        """The window's mean loss of an answer token, nats; None where no token counts."""
        return self.loss_sum / self.answer_tokens if self.answer_tokens > 0 else None


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train by name; a tied one stands once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def optimizer_for(
    model: nn.Module, train: TrainConfig, learning_rate: float, states: States = "float32"
) -> torch.optim.Optimizer:
    """Return AdamW over what trains; matrices decay by `train.weight_decay`, vectors (norms, biases) do not.

    Torch's own, one tensor at a time (neither foreach nor fused): the same bytes on every machine, and no second copy
    of the state. Other `states` have their own; raises `ConfigError` for "8bit" where bitsandbytes is missing.
    """
    parameters = list(trainable(model).values())
    split = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in split if group["params"]]
    settings: dict[str, Any] = {"lr": learning_rate, "betas": (train.beta1, train.beta2), "eps": train.epsilon}
    if states == "8bit":
        return AdamW8bit(groups, **settings)
    if states == "4bit":
        return AdamW4bit(groups, **settings)
    if states == "mini":
        return AdamMini(groups, head_rows(model), **settings)
    if states == "host":
        return HostAdamW(groups, **settings)
    return torch.optim.AdamW(groups, **settings, foreach=False, fused=False)


def moments_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Moments:
    """Return (exp_avg, exp_avg_sq) of each trained parameter by name; zeros for one that was never updated.

    Moments held in another form come as float32 copies.
    """
    moments: Moments = {}
    for name, parameter in trainable(model).items():
        state = optimizer.state.get(parameter, {})
        if not state:
            moments[name] = (torch.zeros_like(parameter), torch.zeros_like(parameter))  # two: a file names each once
        elif isinstance(optimizer, HeldAdamW):
            moments[name] = optimizer.decode(parameter, state)
        else:
            moments[name] = (state["exp_avg"], state["exp_avg_sq"])
    return moments


def load_moments(optimizer: torch.optim.Optimizer, model: nn.Module, moments: Mapping[str, tuple[Tensor, Tensor]],
                 updates: int) -> None:  # fmt: skip
    """Give moments (by parameter name) and the number of updates they have seen to `optimizer`, which takes them over.

    Raises KeyError for a trained parameter without moments: half a state would be neither a start nor a resume.
    """
    for name, parameter in trainable(model).items():
        average, square = moments[name]
        if isinstance(optimizer, HeldAdamW):
            optimizer.state[parameter] = optimizer.encode(parameter, average, square, updates)
            continue
        optimizer.state[parameter] = {
            "step": torch.tensor(float(updates)),
            "exp_avg": placed(average.to(parameter.dtype), parameter),
            "exp_avg_sq": placed(square.to(parameter.dtype), parameter),
        }


def held_states(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return what the optimizer holds of each trained parameter, as `state.parameter`, bit for bit: for a snapshot."""
    held = {}
    for name, parameter in trainable(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            held[f"{key}.{name}"] = torch.as_tensor(value)
    return held


def load_states(optimizer: torch.optim.Optimizer, model: nn.Module, held: Mapping[str, Tensor]) -> None:
    """Give back what `held_states` returned; a parameter that had none has none."""
    found: dict[str, dict[str, Tensor]] = {}
    for place, value in held.items():
        key, _, name = place.partition(".")
        found.setdefault(name, {})[key] = value
    for name, parameter in trainable(model).items():
        for key, value in found.get(name, {}).items():
            counts = key == "step"
            if counts:
                optimizer.state[parameter][key] = int(value) if isinstance(optimizer, HeldAdamW) else value
            elif isinstance(optimizer, HostAdamW):
                optimizer.state[parameter][key] = room(parameter, optimizer.host).copy_(value)
            else:
                optimizer.state[parameter][key] = placed(value, parameter)


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Sequence[TokenBatch],
    *,
    clip: float,
    precision: str = "float32",
    all_reduce: AllReduce | None = None,
    loss_chunks: int = 1,
    products: RowProducts | None = None,
    in_backward: bool = False,
    host: str | None = None,
    bounds: Bounds | None = None,
    within: Callable[[TokenBatch], AbstractContextManager[None]] | None = None,
) -> StepResult:
    """Take one step of `optimizer` on this rank's share of a window.

    Args:
        model: in training mode.
        window: this rank's micro-batches, on the model's device; may be empty where other ranks hold the window.
        clip: largest norm of the mean gradient over all trained parameters.
        precision: "bfloat16" runs the forward pass under autocast; parameters, gradients and moments stay as they are.
        all_reduce: sums tensors over ranks in place; None for one rank. Where weights are spread over ranks, every one
            makes the same number of passes: one with fewer micro-batches adds some whose documents weigh nothing. Their
            gradients are summed inside the passes, so no squared norms for the noise scale are seen.
        loss_chunks: in how many parts a micro-batch's answer tokens go through the output head.
        products: also reads each document's product with its direction from the backward passes.
        in_backward: hold one parameter's gradient at a time. The window is gone through twice: the first pass measures
            the gradient's norm, the second updates each parameter as soon as its gradient is there. What comes out is
            the same to the bit, dropout included. Needs a window of one micro-batch on one rank.
        host: device on which activations wait between the passes; None leaves them where they are.
        bounds: what the window may at most show to be applied; it then measures the update.
        within: gives a context that each micro-batch's forward pass runs in; what it passes backward is added up too.

    Raises `ShortOfMemoryError` where memory ran out before an update, and `ConfigError` for `in_backward` with more
    micro-batches or ranks: their gradients must be added up first.
    """
    if in_backward and (len(window) != 1 or all_reduce is not None):
        raise ConfigError(
            "updates inside the backward pass have the whole window in one micro-batch on one worker",
            f"{len(window)} micro-batches" + (", on several workers" if all_reduce else ""),
            "plan again, or leave `update_in_backward` out of `plan.savings`",
        )
    parameters, spread = list(trainable(model).values()), sharded(model)
    device = parameters[0].device
    losses: list[Tensor] = []
    counts: list[Tensor] = []
    found: list[Tensor] = []
    totals = torch.zeros(6, dtype=torch.float64, device=device)  # loss, tokens, Σ|g_i|², Σ1/b_i, micro-batches, short
    before = generators(device) if in_backward else None
    watched: AbstractContextManager[list[Exception]]
    watched = nullcontext([]) if spread else noted()  # the others wait inside a pass that one has left: all must end
    with accumulating(parameters, keep=not in_backward) as gradient, products or nullcontext(), watched as ran_out:
        for batch in window:
            if products is not None:
                products.begin(batch)
            inside = within(batch) if within else None
            loss_D, tokens_D, sums_5 = _micro_batch(model, batch, precision, loss_chunks, gradient, host, inside)
            if products is not None:
                found.append(products.take() / batch.weights_D)  # 0 / 0 is NaN: backward did not see the document
            losses.append(loss_D)
            counts.append(tokens_D)
            totals[:5] += sums_5
    totals[5] += len(ran_out)
    sums = [] if in_backward else gradient.sums(parameters)
    if all_reduce is not None:
        all_reduce([totals] if spread else [*sums, totals])
    if ran_out or (all_reduce is not None and totals[5] > 0):
        raise ShortOfMemoryError(str(ran_out[0]) if ran_out else "memory ran out on another rank")
    loss_sum, tokens, small, inverse, micro = totals[:5].tolist()
    if in_backward:
        square = gradient.square(parameters)
    else:
        square = torch.stack([torch.linalg.vector_norm(own(item)).double() for item in sums]).square().sum()
        if spread and all_reduce is not None:
            all_reduce([square])
    norm = math.sqrt(square.item()) / tokens if tokens > 0 else math.nan
    applied = tokens > 0 and (bounds or Bounds()).allow(loss_sum / tokens, norm)
    if applied:
        clipped = min(1.0, clip / (norm + 1e-6))
        factor = clipped / tokens
        if before is not None:
            restore(before)
            measured = partial(bounds.measured, factor=clipped) if bounds else None
            with updating(parameters, optimizer, factor, measured):
                _objective(model, window[0], precision, loss_chunks, host)[0].backward()
        else:
            for parameter, item in zip(parameters, sums, strict=True):
                parameter.grad = item.mul_(factor)
            with bounds.measured(parameters, clipped) if bounds else nullcontext():
                optimizer.step()
            if bounds and spread and all_reduce is not None:
                bounds.add_up(all_reduce)
    optimizer.zero_grad(set_to_none=True)
    pair = (
        NormPair(small / micro, inverse / micro, norm**2, 1 / tokens) if applied and micro >= 2 and not spread else None
    )
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


def _micro_batch(
    model: nn.Module, batch: TokenBatch, precision: str, loss_chunks: int, gradient: Gradient, host: str | None,
    inside: AbstractContextManager[None] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (loss_D, tokens_D, what it adds to the window's totals) of a forward and backward pass."""
    with inside or nullcontext():
        objective, loss_D, tokens_D = _objective(model, batch, precision, loss_chunks, host)
    weight = (tokens_D * batch.weights_D.double()).sum()
    gradient.micro_square = torch.zeros((), dtype=torch.float64, device=weight.device)
    objective.backward()
    one = weight.new_ones(())
    sums_5 = [objective.detach().double(), weight, gradient.micro_square / weight**2, one / weight, one]
    return loss_D.detach(), tokens_D, torch.stack(sums_5)


def _objective(
    model: nn.Module, batch: TokenBatch, precision: str, loss_chunks: int, host: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weighted sum of losses, loss_D, tokens_D) of a forward pass."""
    saving = nullcontext() if host is None else Offloading(model, host)
    with saving, torch.autocast(batch.input_ids_BT.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        loss_D, tokens_D = document_losses(model, batch, chunk_tokens=chunk_of(batch, loss_chunks))
    return (loss_D * batch.weights_D.to(loss_D.dtype)).sum(), loss_D, tokens_D
