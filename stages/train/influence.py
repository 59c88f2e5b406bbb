"""Influence read in training: the direction that every visited row's gradient is multiplied with, and when it is made.

The direction is D Ḡ: the target's mean gradient, preconditioned by the optimizer's own second moments, as the score
stage makes it from a checkpoint. It is held fixed over a segment, or until the next evaluation; all ranks share the
target's rows and hold the same direction. How products are read is `gradients.row_products`'s part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from data_contracts.arrow import read_table
from data_contracts.config import TrainConfig
from data_contracts.errors import ModelError
from stages.gradients.precondition import mean_gradient, precondition
from stages.gradients.row_products import RowProducts, covered
from stages.meter.flops import FlopModel
from stages.model.batch import TokenTable, collate, length_buckets
from stages.technique.optimizer import Optimizer, moments_in
from stages.technique.step import trainable
from stages.train.examples import predicted_tokens
from stages.workers.group import Group


class Influence:
    """What the target asks of the weights, and the products with it.

    Args:
        target: the target's `tokens` table.
        model: trains.
        train: the optimizer's settings.
        batch_tokens: padded tokens of one forward and backward pass over target rows.
        names: parameters that the direction is of; None is all that products can be read of in training.
        every: optimizer steps that a direction is kept; None goes by `train.influence`.

    Attributes:
        read: whether products are read in training; if not, the direction is a batch selector's.

    Raises `ModelError` where no linear layer or embedding trains.
    """

    def __init__(
        self, target: Path, model: nn.Module, train: TrainConfig, batch_tokens: int, names: list[str] | None = None,
        every: int | None = None,
    ) -> None:  # fmt: skip
        table = read_table(target)
        self._table, self._model, self._train = TokenTable(table), model, train
        lengths, answers = self._table.lengths, predicted_tokens(table)
        self._buckets = length_buckets([int(length) for length in lengths], batch_tokens)
        self._shapes = [(len(bucket), int(lengths[bucket[0]]), int(answers[bucket].sum())) for bucket in self._buckets]
        self.tokens = int(lengths.sum())
        self._covered = covered(model) if names is None else names
        if not self._covered:
            raise ModelError(
                "a trainable linear layer or embedding where `train.influence` is set",
                f"{type(model).__name__} has none that torch computes",
                "unset `train.influence`",
            )
        self.products: RowProducts | None = None
        self._every, self.read = every, every is None

    def due(self, step: int, evaluated: bool) -> bool:
        """Return whether the direction is made again after `step` steps of the segment, just evaluated or not."""
        return step % self._every == 0 if self._every else evaluated and self._train.influence == "evaluation"

    def flops(self, meter: FlopModel) -> int:
        """Return the operations of making one direction, padding included."""
        return sum(meter.train(*shape) for shape in self._shapes)

    @property
    def direction(self) -> Mapping[str, Tensor]:
        """The direction by parameter name; empty before there is one."""
        return self.products.direction if self.products is not None else {}

    def spent(self, group: Group) -> int:
        """Return the operations of the products since the last call, over all ranks; every rank must call it."""
        flops = torch.zeros(1, dtype=torch.float64, device=group.device)
        if self.products is not None:
            flops += self.products.extra_flops
            self.products.extra_flops = 0
        group.sum_([flops])
        return int(flops)

    def hold(self, direction: Mapping[str, Tensor]) -> None:
        """Multiply with `direction` from now on; with none where it is empty.

        It is copied: what a file gave lies at any address, and the last bits of a product depend on alignment.
        """
        named = trainable(self._model)
        placed = {name: torch.empty_like(named[name]).copy_(value) for name, value in direction.items()}
        self.products = RowProducts(self._model, placed) if placed else None

    def make(self, optimizer: Optimizer, group: Group, precision: str) -> None:
        """Make the direction of the weights and moments as they are; leaves the model in evaluation mode.

        One forward and backward pass over the target, shared by the ranks; the optimizer has updates behind it. Raises
        `InputError` where a target row has no token to predict.
        """
        self.products = None  # not held twice
        self._model.eval()
        named = trainable(self._model)
        batches = (
            collate([self._table.row(index) for index in bucket]).to(group.device)
            for bucket in self._buckets[group.rank :: group.size]
        )
        own = sum(len(bucket) for bucket in self._buckets[group.rank :: group.size])
        found: dict[str, Tensor] = {}
        if own:
            found, _, _ = mean_gradient(
                self._model, batches, autocast=torch.bfloat16 if precision == "bfloat16" else None
            )
        share = own / len(self._table)
        mean = {
            name: found[name].mul_(share) if name in found else torch.zeros_like(named[name]) for name in self._covered
        }
        group.sum_(list(mean.values()))
        moments = moments_in(optimizer.tensors())
        settings = {"beta2": self._train.beta2, "epsilon": self._train.epsilon}
        self.hold(precondition(mean, moments, optimizer.updates, **settings))
