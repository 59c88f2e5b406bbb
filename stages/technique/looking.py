"""Looking at a step's candidates: one pass over each micro-batch hands every row's gradient to the batch selector.

The passes are those of `gradients.examples`, over the parameters that the selector reads: backward goes no deeper than
the lowest of them, and nothing of a gradient is kept but the selector's numbers. The model is evaluated without
dropout; blocks that are recomputed in training are recomputed here.
Shapes: D documents of a micro-batch, one a row; K numbers kept of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stages.gradients.examples import ExampleGradients
from stages.gradients.precondition import denominator
from stages.meter.flops import FlopModel
from stages.model.batch import TokenBatch
from stages.technique.batch_selector import BatchSelector
from stages.technique.recompute import blocks_of
from stages.technique.step import Moments


@dataclass(frozen=True)
class Given:
    """What a selector reads beside a row's gradient.

    Attributes:
        moments: Adam's (exp_avg, exp_avg_sq) by parameter name.
        updates: that made them.
        beta1, beta2, epsilon: the optimizer's.
        direction: D Ḡ of the target by parameter name; empty where the selector reads none.
        mean_tokens: mean over the step's candidates of weight times answer tokens. A row's gradient is handed over as
            weight times the gradient of its summed loss, over this: what it adds to a window's mean gradient, times the
            window's rows, where rows are of like length.
    """

    moments: Moments
    updates: int
    beta1: float
    beta2: float
    epsilon: float
    direction: Mapping[str, Tensor]
    mean_tokens: float

    def root(self, name: str) -> Tensor:
        """Return √v̂ + ε of a parameter, flat; infinite where v = 0. Needs an update behind it."""
        square = self.moments[name][1]
        found = denominator(name, square, self.moments, self.updates, beta2=self.beta2, epsilon=self.epsilon)
        return found.flatten()


class Looking:
    """A context that gives the selector's numbers of every row of a micro-batch.

    Args:
        selector: says what is kept.
        model: in any mode; on leaving it is in training mode.
        sizes: numbers of elements of the parameters it reads, by name.
        given: for `selector.note`.
        precision: of the forward pass.
    """

    def __init__(
        self, selector: BatchSelector, model: nn.Module, sizes: Mapping[str, int], given: Given, precision: str
    ) -> None:
        self._selector, self._model, self._given = selector, model, given
        self.numbers = selector.numbers(sizes)
        autocast = torch.bfloat16 if precision == "bfloat16" else None
        self._gradients = ExampleGradients(model, autocast=autocast, parameters=sizes)

    def __enter__(self) -> Looking:
        self._model.eval()
        for block in blocks_of(self._model):
            block.training = True  # of the block alone: it is then recomputed where it would be in training
        self._gradients.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._gradients.__exit__(*error)
        self._model.train()

    def of(self, batch: TokenBatch) -> Tensor:
        """Return number_DK, float32, in main memory; one forward and one backward pass."""
        scale_D = batch.weights_D / self._given.mean_tokens
        number_DK = torch.zeros(len(batch.example_ids), self.numbers, device=scale_D.device)

        def take(name: str, some: slice, gradient_dP: Tensor) -> None:
            scaled_dP = gradient_dP.float().mul_(scale_D[some, None])
            self._selector.note(number_DK[some], name, scaled_dP, self._given)

        self._gradients.of(batch, take)
        return number_DK.cpu()


def look_passes(model: nn.Module, names: Collection[str]) -> FlopModel:
    """Return the operations of looking at rows: `train` of it is a pass forward, and backward down to `names`."""
    with _only(model, names):
        return FlopModel.trace(model, train=True)


@contextmanager
def _only(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def sizes_of(model: nn.Module, names: Collection[str]) -> dict[str, int]:
    """Return the number of elements of each named parameter, in the model's order."""
    wanted = set(names)
    return {name: parameter.numel() for name, parameter in model.named_parameters() if name in wanted}
