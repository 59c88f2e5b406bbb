"""Resume snapshots: everything a segment needs to go on from a step as if it had never stopped.

A snapshot is a folder with `state.json` (position, schedule, best evaluation, counters) and `tensors.safetensors`
(moved weights, the optimizer's state, every rank's generator states, influence's direction). Where weights are spread
over ranks, every rank adds a file of its own parts. It is complete or absent by rename. The last two are kept, and
those that their guard may still go back to. A snapshot of other work, or one that cannot be read, is passed over.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.model.shards import own
from stages.technique.optimizer import Optimizer
from stages.train.beginning import Beginning
from stages.workers.group import Group

STATE, TENSORS = "state.json", "tensors.safetensors"
OPTIMIZER = "optimizer."
KEPT = 2


def generator_states(group: Group) -> dict[str, Tensor]:
    """Return the generator states of every rank by name; every rank must call it."""
    states = {f"rng.cpu.{rank}": state for rank, state in enumerate(group.gather(torch.get_rng_state()))}
    if torch.device(group.device).type == "cuda":
        own = torch.cuda.get_rng_state(group.device)
        states |= {f"rng.cuda.{rank}": state for rank, state in enumerate(group.gather(own))}
    return states


@dataclass(frozen=True)
class Snapshot:
    """One complete snapshot on disk."""

    folder: Path
    state: dict[str, Any]

    def restore(self, optimizer: Optimizer, group: Group) -> None:
        """Put the optimizer, the weights that it moves and this rank's generator states back."""
        self.put(optimizer, group)
        with safe_open(self.folder / TENSORS, framework="pt") as stored:
            torch.set_rng_state(stored.get_tensor(f"rng.cpu.{group.rank}"))
            if torch.device(group.device).type == "cuda":
                torch.cuda.set_rng_state(stored.get_tensor(f"rng.cuda.{group.rank}"), group.device)

    def put(self, optimizer: Optimizer, group: Group) -> None:
        """Put the optimizer and the weights that it moves back."""
        part = self.folder / part_of(group.rank if self.state.get("parts", 1) > 1 else 0)
        with safe_open(part, framework="pt") as stored, torch.no_grad():
            names = [name for name in stored.keys() if name.startswith(OPTIMIZER)]  # noqa: SIM118 - no mapping
            state = {name.removeprefix(OPTIMIZER): stored.get_tensor(name) for name in names}
            optimizer.restore(self.state["optimizer"], state)
            for name, weight in optimizer.weights().items():
                own(weight).copy_(stored.get_tensor(f"param.{name}"))

    def direction(self) -> dict[str, Tensor]:
        """Return the direction of influence by parameter name; empty where none had been made."""
        with safe_open(self.folder / TENSORS, framework="pt") as stored:
            names = [name for name in stored.keys() if name.startswith("direction.")]  # noqa: SIM118 - no mapping
            return {name.removeprefix("direction."): stored.get_tensor(name) for name in names}


class Snapshots:
    """The snapshots of one attempt's folder.

    Args:
        home: the folder they lie in.
        digest: of the work; only its own snapshots are found.
        beginning: the state of step 0 where it lies on disk already.
    """

    def __init__(self, home: Path, digest: str, beginning: Beginning | None = None) -> None:
        self._home, self._digest, self.beginning = home, digest, beginning

    def latest(self) -> Snapshot | None:
        """Return the newest readable snapshot of this work, or None."""
        for folder in reversed(self._complete()):
            try:
                state = json.loads((folder / STATE).read_text(encoding="utf-8"))
                for part in range(state.get("parts", 1)):
                    with safe_open(folder / part_of(part), framework="pt"):
                        pass
            except (OSError, ValueError, SafetensorError):
                continue  # cut short by a full disk or a foreign hand: an older one, or the start, is as good
            if state.get("work") == self._digest:
                return Snapshot(folder, state)
        return None

    def at(self, step: int) -> Snapshot | Beginning:
        """Return the state of a step that is kept."""
        if step == 0 and self.beginning is not None:
            return self.beginning
        folder = self._home / f"{step:09d}"
        return Snapshot(folder, json.loads((folder / STATE).read_text(encoding="utf-8")))

    def write(
        self,
        step: int,
        optimizer: Optimizer,
        rng: dict[str, Tensor],
        state: dict[str, Any],
        direction: Mapping[str, Tensor],
        spread: Group | None = None,
    ) -> None:
        """Write the snapshot of `step` whole, then drop those that are not kept.

        For rank 0; for every rank of the group `spread` where weights are spread over it.
        """
        scratch = self._home / f".{step:09d}.unfinished"
        group = spread or Group()
        if group.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        group.wait()
        tensors = {f"param.{name}": _held(weight) for name, weight in optimizer.weights().items()}
        tensors |= {OPTIMIZER + name: _held(value) for name, value in optimizer.held().items()}
        tensors |= {f"direction.{name}": _held(value) for name, value in direction.items()}
        part = scratch / part_of(group.rank)
        save_file(tensors | (rng if group.rank == 0 else {}), part)
        _sync(part)
        group.wait()
        if group.rank > 0:
            return
        (scratch / STATE).write_text(
            json.dumps(state | {"optimizer": optimizer.plain(), "work": self._digest, "parts": group.size}),
            encoding="utf-8",
        )
        for path in (scratch / STATE, scratch):
            _sync(path)
        final = self._home / f"{step:09d}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(scratch, final)
        _sync(self._home)
        named = {state for place in self._positions()[-KEPT:] for state, *_ in place["guard"].get("states", ())}
        for old in self._complete()[:-KEPT]:
            if int(old.name) not in named:
                shutil.rmtree(old, ignore_errors=True)

    def best_steps(self) -> set[int]:
        """Return the steps whose best checkpoints the kept snapshots still refer to."""
        return {int(place["best"]["step"]) for place in self._positions() if place["best"]}

    def _positions(self) -> list[dict[str, Any]]:
        """Return the positions of the snapshots that can be read, oldest first."""
        found = []
        for folder in self._complete():
            try:
                found.append(json.loads((folder / STATE).read_text(encoding="utf-8"))["position"])
            except (OSError, ValueError, KeyError):
                continue  # `latest` passes over it too
        return found

    def _complete(self) -> list[Path]:
        return sorted(path for path in self._home.glob("[0-9]*") if path.is_dir())


def part_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return TENSORS if rank == 0 else f"tensors.{rank}.safetensors"


def _held(tensor: Tensor) -> Tensor:
    return own(tensor).detach().to("cpu").contiguous()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
