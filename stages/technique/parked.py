"""Groups of parameters that take turns window by window, each with moments of its own that wait in main memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from stages.model.batch import TokenBatch
from stages.technique.blocks import Block, BlockAdam, Schedule
from stages.technique.optimizer import How, moments_in, named_moments
from stages.technique.step import Moments, StepResult, load_moments, moments_of

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig


class ParkedBlocks(BlockAdam):
    """AdamW on one block at a time, whose moments are parked in main memory while others train.

    The learning rate changes once a cycle only, so that all blocks of a cycle move at the same one (HiFT's delayed
    update). `updates` counts those of the block at hand.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[Block], schedule: Schedule, train: TrainConfig, rate: float
    ) -> None:
        self._parked: Moments = {}
        self._counts = [0] * len(blocks)
        self._cycle_rate = rate
        super().__init__(model, blocks, schedule, train, rate)

    def enter(self, period: int) -> None:
        """Park the moments of the block at hand and fetch those of the next."""
        if hasattr(self, "adamw"):
            for name, (first, second) in moments_of(self.adamw, self.model).items():
                self._parked[name] = (first.to("cpu"), second.to("cpu"))
            self._counts[self.block] = self.updates
            del self.adamw
        super().enter(period)
        self.updates = self._counts[self.block]
        if self.updates:
            load_moments(self.adamw, self.model, self._parked, self.updates)
        for name in self.blocks[self.block]:
            self._parked.pop(name, None)

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one step of AdamW on the block whose turn it is, at the rate that its cycle began with."""
        if self.windows % (len(self.blocks) * self.schedule.stay) == 0:
            self._cycle_rate = rate
        return super().step(window, self._cycle_rate, **how)

    def plain(self) -> dict[str, Any]:
        """Add every block's updates and the cycle's rate."""
        counts = [self.updates if block == self.block else count for block, count in enumerate(self._counts)]
        return super().plain() | {"counts": counts, "rate": self._cycle_rate}

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments of every block that has trained, and of the one at hand."""
        return super().tensors() | named_moments(self._parked)

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take all blocks' moments over."""
        super().restore(plain, tensors)
        self._counts, self._cycle_rate = [int(count) for count in plain["counts"]], float(plain["rate"])
        here = self.blocks[self.block]
        self._parked = {name: pair for name, pair in moments_in(tensors).items() if name not in here}

    def held(self) -> dict[str, Tensor]:
        """Return all moments."""
        return self.tensors()

    def stand(self) -> dict[str, list[Tensor]]:
        """Return what is held with the dearest block at hand; the parked moments count where they share its memory."""
        found = super().stand()
        for block in self.blocks:
            for name, item in block.items():
                if name not in found and item.device.type == "cpu":
                    self._parked[name] = (torch.zeros_like(item), torch.zeros_like(item))
        return found | {name: list(pair) for name, pair in self._parked.items()}
