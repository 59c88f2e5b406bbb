"""The batch selector of a segment: each rank looks at its share of a step's candidates, and all choose alike.

What is looked at, and what that costs, follows from lengths alone, before anything runs; what is chosen follows from
the weights, moments and rows of the step, so that a resumed segment chooses the same. How a row is read and which are
taken is the selector's part (`stages.technique.batch_selector`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from data_contracts.config import TrainConfig
from stages.meter.flops import FlopModel
from stages.technique.attempt import ShortOfMemoryError, noted
from stages.technique.batch_selector import BatchSelector, Picked
from stages.technique.looking import Given, Looking, look_passes, sizes_of
from stages.technique.optimizer import Optimizer, moments_in
from stages.train.examples import Examples
from stages.train.position import Position
from stages.train.telemetry import Telemetry
from stages.train.windows import Windows
from stages.workers.group import Group


class Choosing:
    """Chooses the rows of every step.

    Args:
        selector: how.
        model: wrapped, as it trains.
        examples: the selected rows.
        train: the optimizer's settings.

    Attributes:
        looked: whether the last step's candidates were looked at.
        seconds: that the last step's choice took.

    Raises `ConfigError` where the model has none of the parameters that the selector reads.
    """

    def __init__(self, selector: BatchSelector, model: nn.Module, examples: Examples, train: TrainConfig) -> None:
        self.selector, self._model, self._examples, self._train = selector, model, examples, train
        self._names = selector.read(model)
        self._sizes = sizes_of(model, self._names)
        self.looked, self.seconds = False, 0.0
        self._passes: FlopModel | None = None

    @property
    def directed(self) -> dict[str, Any]:
        """Arguments of the direction that the selector reads; see `Influence`."""
        return {"names": self._names, "every": self.selector.direction_steps} if self.selector.reads_target else {}

    def note(self, windows: Windows, at: Position, picked: Picked, telemetry: Telemetry | None) -> None:
        """Count the choice of the step that was just made, on rank 0 write it too."""
        rows, tokens = windows.candidates(at.step - 1)[0], 0
        if self.looked:
            tokens = int(self._examples.lengths[rows].sum())
            at.select_tokens += tokens
            at.select_flops += self.flops(windows, at.step - 1) if telemetry else 0
        if telemetry is not None:
            telemetry.choices(rows, self._examples, picked)
            telemetry.timing("choice", time.perf_counter() - self.seconds, tokens)

    def flops(self, windows: Windows, step: int) -> int:
        """Return the operations of looking at a step's candidates, padding included."""
        if self._passes is None:
            self._passes = look_passes(self._model, self._names)
        rows, layout = windows.candidates(step)
        answers = self._examples.answers[rows]
        passes = sum(
            self._passes.train(len(micro.rows), micro.padded, int(answers[micro.places].sum())) for micro in layout
        )
        return passes + len(rows) * self.selector.row_flops(self._sizes)

    def choose(
        self, windows: Windows, step: int, optimizer: Optimizer, direction: Mapping[str, Tensor], group: Group,
        precision: str,
    ) -> Picked:  # fmt: skip
        """Return what step `step` (0-based) trains on; every rank must call it. Leaves the model in training mode.

        Raises `ShortOfMemoryError` on all ranks where memory ran out on one.
        """
        began = time.perf_counter()
        rows, layout = windows.candidates(step)
        count = self.selector.kept(len(rows))
        self.looked = not self.selector.reads_target or bool(direction and optimizer.updates)
        if not self.looked:
            self.seconds = time.perf_counter() - began
            return Picked.first(count)
        examples, train = self._examples, self._train
        moments = moments_in(optimizer.tensors())
        given = Given(
            {name: moments[name] for name in self._sizes}, optimizer.updates, train.beta1, train.beta2, train.epsilon,
            direction, float((examples.answers[rows] * examples.weights[rows]).mean()) or 1.0,
        )  # fmt: skip
        with noted() as ran_out, Looking(self.selector, self._model, self._sizes, given, precision) as look:
            number_nK = torch.zeros(len(rows), look.numbers)
            for micro in layout[group.rank :: group.size]:
                batch = examples.batch(rows, micro, False).to(group.device)
                number_nK[micro.places] = look.of(batch)
        short = torch.tensor([float(len(ran_out))], device=group.device)
        group.sum_([short])
        if short > 0:
            raise ShortOfMemoryError(str(ran_out[0]) if ran_out else "memory ran out on another rank")
        if group.size > 1:
            placed_nK = number_nK.to(group.device)
            group.sum_([placed_nK])
            number_nK = placed_nK.cpu()
        source_n = examples.sources[rows]
        picked = self.selector.choose(number_nK.numpy(), source_n, examples.shares[source_n], count)
        self.seconds = time.perf_counter() - began
        return picked
