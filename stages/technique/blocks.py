"""Blocks of a model that train one after another: which there are, in which order, and Adam inside the one at hand.

Only the block at hand has gradients and moments; entering the next drops them, so the optimizer's memory is that of one
block. Which block a window belongs to follows from the seed and the window's number alone, so that all ranks and every
resumed life agree. How long a block stays and in which order they come is the technique's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from typing_extensions import Unpack

from data_contracts.errors import ModelError
from stages.meter.flops import FlopModel, recomputed
from stages.model.batch import TokenBatch
from stages.model.loss import plain
from stages.technique.base import Order
from stages.technique.optimizer import How, Optimizer, give, named_moments, set_rate, stood
from stages.technique.step import States, StepResult, held_states, moments_of, optimizer_for, optimizer_step

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig

Block = Mapping[str, nn.Parameter]
"""Parameters by the name that the model gives them."""


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name in `model`, module) of the decoder's layers from the bottom.

    Raises `ModelError` where there is no list of `num_hidden_layers` modules in the decoder.
    """
    decoder, count = plain(model).base_model, plain(model).config.num_hidden_layers
    for name, module in model.named_modules():
        inside = any(module is item for item in decoder.modules())
        if isinstance(module, nn.ModuleList) and len(module) == count and inside:
            return [(f"{name}.{number}", layer) for number, layer in enumerate(module)]
    raise ModelError(
        "a decoder with a list of layers, to train them block by block",
        f"{type(decoder).__name__} has no list of {count} modules",
        "use `full` or `lora`",
    )


def layer_blocks(model: nn.Module, size: int = 1) -> list[Block]:
    """Return blocks of `size` neighbouring layers from the bottom; a last one holds what is left."""
    layers = layers_of(model)
    return [
        {
            f"{name}.{inner}": parameter
            for name, layer in layers[start : start + size]
            for inner, parameter in layer.named_parameters()
        }
        for start in range(0, len(layers), size)
    ]


def outer_blocks(model: nn.Module) -> tuple[Block, Block]:
    """Return what lies outside the layers: the embeddings below, and the last norm and an untied head above."""
    inside = {id(parameter) for block in layer_blocks(model) for parameter in block.values()}
    outside = {name: item for name, item in model.named_parameters() if id(item) not in inside}
    embeddings = {
        id(item) for part in plain(model).modules() if isinstance(part, nn.Embedding) for item in part.parameters()
    }
    below = {name: item for name, item in outside.items() if id(item) in embeddings}
    return below, {name: item for name, item in outside.items() if name not in below}


def all_blocks(model: nn.Module, size: int = 1) -> list[Block]:
    """Return blocks of everything, from the bottom: embeddings, `size` layers each, and what lies above.

    Vectors alone (a last norm under a tied head) would waste a turn: they belong to the highest layers' block.
    """
    (below, above), layers = outer_blocks(model), layer_blocks(model, size)
    if all(item.ndim < 2 for item in above.values()):
        layers[-1], above = {**layers[-1], **above}, {}
    return [block for block in (below, *layers, above) if block]


@dataclass(frozen=True)
class Schedule:
    """Which block trains when.

    Args:
        blocks: how many.
        stay: windows that a block stays.
        order: of a cycle through all; "random" draws a new one for every cycle.
        seed: of the random orders.
    """

    blocks: int
    stay: int
    order: Order
    seed: int

    def period(self, window: int) -> int:
        """Return the number of the stay that a window (0-based) belongs to."""
        return window // self.stay

    def block(self, period: int) -> int:
        """Return the block of a stay."""
        cycle, place = divmod(period, self.blocks)
        if self.order == "random":
            return int(np.random.default_rng([self.seed, cycle]).permutation(self.blocks)[place])
        return place if self.order == "ascending" else self.blocks - 1 - place


class Turns(Optimizer):
    """Steps of one block at a time, as a schedule says.

    Attributes:
        schedule: which block trains when.
        period: the stay whose state stands.
    """

    schedule: Schedule
    period: int

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        super().__init__(model)
        self.schedule = schedule
        self._prices: dict[int, FlopModel] = {}

    @property
    def block(self) -> int:
        """The block at hand."""
        return self.schedule.block(self.period)

    def plain(self) -> dict[str, Any]:
        """Add the seed of all draws and the stay whose state stands."""
        return super().plain() | {"seed": self.schedule.seed, "period": self.period}

    def price(self, window: int) -> FlopModel:
        """Return the operations of a window, which are those of its block."""
        block = self.schedule.block(self.schedule.period(window))
        if block not in self._prices:
            self._prices[block] = self._priced_block(block)
        return self._prices[block]

    def cycle(self) -> Sequence[int]:
        """Return one window a block of layers, whose mean is linear in depth; embeddings are near it."""
        layers = self.layer_numbers()
        periods = [period for period in range(self.schedule.blocks) if self.schedule.block(period) in layers]
        return [period * self.schedule.stay for period in periods]

    @abstractmethod
    def layer_numbers(self) -> set[int]:
        """Return the numbers of the blocks that hold layers."""

    @abstractmethod
    def _priced_block(self, block: int) -> FlopModel:
        """Return the operations of a window of `block`."""


class BlockAdam(Turns):
    """AdamW on one block at a time.

    Args:
        model: its parameters' `requires_grad` is this optimizer's to set.
        blocks: from the bottom of the model to its top.
        schedule: which of them trains when.
        train, rate, states: AdamW's settings.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[Block], schedule: Schedule, train: TrainConfig, rate: float,
        states: States = "float32",
    ) -> None:  # fmt: skip
        super().__init__(model, schedule)
        self.blocks = list(blocks)
        self._train, self._rate, self._states = train, rate, states
        self.enter(0)

    def enter(self, period: int) -> None:
        """Let the block of stay `period` train, without a past."""
        self.period, self.updates = period, 0
        self._only(self.block)
        self.adamw = optimizer_for(self.model, self._train, self._rate, self._states)

    def _only(self, block: int) -> None:
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        for parameter in self.blocks[block].values():
            parameter.requires_grad_(True)

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one step of AdamW on the block that the window belongs to."""
        if (period := self.schedule.period(self.windows)) != self.period:
            self.enter(period)
        set_rate(self.adamw, rate)
        result = optimizer_step(self.model, self.adamw, window, **how)
        self.windows, self.updates = self.windows + 1, self.updates + result.applied
        return result

    def layer_numbers(self) -> set[int]:
        """Return the numbers of the blocks that hold layers."""
        names = {name for block in layer_blocks(self.model) for name in block}
        return {number for number, block in enumerate(self.blocks) if not names.isdisjoint(block)}

    def weights(self) -> Mapping[str, Tensor]:
        """Return the parameters of all blocks."""
        return {name: parameter for block in self.blocks for name, parameter in block.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments of the block at hand."""
        return named_moments(moments_of(self.adamw, self.model))

    def held(self) -> dict[str, Tensor]:
        """Return AdamW's states as they are."""
        return held_states(self.adamw, self.model)

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on with the same orders, in the same stay."""
        self.schedule = replace(self.schedule, seed=int(plain["seed"]))
        self.enter(int(plain["period"]))
        super().restore(plain, tensors)
        give(self.adamw, self.model, tensors, self.updates)

    def stand(self) -> dict[str, list[Tensor]]:
        """Enter the dearest block with zero moments; return them and AdamW's counters.

        The lower the block, the more activations are kept for it; of the two lowest (embeddings may be the first) the
        larger counts.
        """
        lowest = max(range(min(2, len(self.blocks))), key=lambda number: (size_of(self.blocks[number]), -number))
        self.enter(next(period for period in range(len(self.blocks)) if self.schedule.block(period) == lowest))
        self.windows = self.period * self.schedule.stay
        return stood(self.adamw, self.model)

    def _priced_block(self, block: int) -> FlopModel:
        """Trace one block, at which the backward pass ends; of a run of more than two alike its two highest.

        The others lie on their line.
        """
        shapes = [sorted(tuple(item.shape) for item in part.values()) for part in self.blocks]
        top = block
        while top + 1 < len(shapes) and shapes[top + 1] == shapes[block]:
            top += 1
        if top - block < 2 or recomputed(self.model):
            return self._traced(block)
        return self._traced(top).deepened(self._traced(top - 1), top - block)

    def _traced(self, block: int) -> FlopModel:
        try:
            self._only(block)
            return FlopModel.trace(self.model, train=True)
        finally:
            self._only(self.block)


def size_of(block: Block) -> int:
    """Return how many numbers a block holds."""
    return sum(parameter.numel() for parameter in block.values())
