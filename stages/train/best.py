"""The checkpoints that a segment may leave, on disk: of its lowest evaluation so far, and of the end to go on from.

Each is written at its evaluation, as the checkpoint it may become; a best one that was outdone is kept until no
snapshot refers to it any more, so that a resumed segment finds whichever it needs. For rank 0; `write` for every rank
where weights are spread.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from data_contracts.records import ModelPin
from stages.model.checkpoint import save_checkpoint
from stages.technique.optimizer import Optimizer

BEST = "best"


class Best:
    """The best checkpoints under `home`, by step of the run."""

    def __init__(self, home: Path, pin: ModelPin) -> None:
        self._home, self._pin = home / BEST, pin

    def write(self, step: int, model: nn.Module, optimizer: Optimizer, trainer: dict[str, Any], *, first: bool) -> None:
        """Write the checkpoint of `step`, in place of one that a life before this left; see `save_checkpoint`."""
        if first:
            shutil.rmtree(self.folder(step), ignore_errors=True)
        save_checkpoint(self.folder(step), model, self._pin, {}, trainer, optimizer.tensors(), first=first)

    def folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return self._home / str(step)

    def keep(self, steps: Iterable[int]) -> None:
        """Remove every checkpoint but those of `steps`."""
        kept = set(steps)
        for folder in self._home.glob("[0-9]*"):
            if int(folder.name) not in kept:
                shutil.rmtree(folder, ignore_errors=True)
