"""The state of a segment's start, where the checkpoint that it began with holds that state to the bit.

It then need not be written again: what the guard goes back to before the first snapshot is due is read from the
checkpoint, an input, which stays for as long as the segment runs. Where weights are held in another form than a
checkpoint's (adapters, packed layers, heads beside the model, parts of spread weights) there is none, and a snapshot is
written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open

from stages.model.checkpoint import MODEL, OPTIMIZER, read_trainer
from stages.model.stored import TYPES
from stages.technique.optimizer import Optimizer
from stages.workers.group import Group


@dataclass(frozen=True)
class Beginning:
    """A checkpoint's folder, read like a snapshot of step 0."""

    folder: Path
    state: ClassVar[dict[str, Any]] = {"position": {"lost": 0}}

    @classmethod
    def of(cls, folder: Path, optimizer: Optimizer) -> Beginning | None:
        """Return it where every weight that `optimizer` moves lies in the checkpoint under its name, as it is held."""
        if not (folder / MODEL).is_file():
            return None
        with safe_open(folder / MODEL, framework="pt") as stored:
            names = set(stored.keys())
            for name, weight in optimizer.weights().items():
                if name not in names:
                    return None
                part = stored.get_slice(name)
                if (part.get_dtype(), part.get_shape()) != (TYPES[weight.dtype], list(weight.shape)):
                    return None
        return cls(folder)

    def put(self, optimizer: Optimizer, group: Group) -> None:
        """Put the optimizer and the weights that it moves back; on every rank alike."""
        with safe_open(self.folder / OPTIMIZER, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
        optimizer.restore(read_trainer(self.folder)["optimizer"], tensors)
        with safe_open(self.folder / MODEL, framework="pt") as stored, torch.no_grad():
            for name, weight in optimizer.weights().items():
                weight.copy_(stored.get_tensor(name))
