"""What one optimizer step holds at every operator, seen without doing the work.

The real step runs on fake tensors (shapes without data) under a dispatch mode that follows every storage from birth to
death, so nothing is modelled: what autograd saves, what a kernel returns, what the optimizer allocates is counted as it
happens. Kernels' own scratch, fragmentation and the process itself are not seen; `estimate.py` adds what is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

UPDATE = "update"
"""The phases are `forward`, `backward`, both `again` where they meet gradients that an earlier micro-batch left, and
`update`. A phase may come in several parts, numbered: `forward`, `forward 2`, …; each runs every layer once."""

_READ = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True)
class Timeline:
    """Bytes held after each operator, by part of a phase in the order they ran.

    `ops[p]`, `live[p]` and `gradients[p]` are alike in length: the operators' names, all bytes held beyond weights and
    moments, and those of them that are gradients waiting for the update.
    """

    weights: int
    moments: int
    ops: dict[str, list[str]]
    live: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


def phase_of(part: str) -> str:
    """Return the phase that a part belongs to."""
    return part.rstrip("0123456789 ")


class StorageWatch(TorchDispatchMode):
    """Follow storages while a step runs; use as a context around it, inside a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = ["forward"]
        self._held = 0
        self._seen = WeakIdKeyDictionary()
        self._births: dict[int, tuple[int, int, int]] = {}  # storage number -> (part, operator, bytes)
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._number = 0
        self._ops: list[list[str]] = [[]]
        self._live: list[list[int]] = [[]]
        self._waiting: list[tuple[int, int, int]] = []

    def own(self, tensors: Iterable[Tensor]) -> int:
        """Take tensors that stay all the time (weights, moments) out of what is followed; return their bytes."""
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen[storage] = True
                total += storage.nbytes()
        return total

    @contextmanager
    def following(self, decoder: torch.nn.Module) -> Iterator[None]:
        """Watch the step inside; each call of `decoder` starts a pass, each call of an optimizer the update."""
        calls = 0

        def start(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                self._begin("forward again" if any(name.startswith("backward") for name in self.parts) else "forward")

        def update(*_: Any) -> None:
            if not self.parts[-1].startswith(UPDATE):
                self._begin(UPDATE)

        handles = [decoder.register_forward_pre_hook(start), register_optimizer_step_pre_hook(update)]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, phase: str) -> None:
        before = sum(phase_of(name) == phase for name in self.parts)
        self.parts.append(f"{phase} {before + 1}" if before else phase)
        self._ops.append([])
        self._live.append([])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ:  # a norm or a loss that is asked for its value: fake tensors have none, and any will do
            return 1.0 if args[0].is_floating_point() else 1
        self._move(torch._C._current_autograd_node() is not None)
        out = func(*args, **(kwargs or {}))
        for item in tree_leaves(out):
            if isinstance(item, Tensor):
                self._see(item)
        self._ops[-1].append(str(func))
        self._live[-1].append(self._held)
        return out

    def _move(self, in_backward: bool) -> None:
        now = self.parts[-1]
        if in_backward and now.startswith("forward"):
            self._begin("backward again" if "again" in now else "backward")
        elif not in_backward and now.startswith("backward again"):
            self._begin(UPDATE)
            self._waiting = [birth for birth in self._births.values() if self.parts[birth[0]].startswith("backward")]

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen[storage] = True
        size, number = storage.nbytes(), self._number
        self._number += 1
        self._held += size
        self._births[number] = (len(self.parts) - 1, len(self._ops[-1]), size)
        self._ends[number] = weakref.ref(storage, lambda _: self._free(number))

    def _free(self, number: int) -> None:
        self._held -= self._births.pop(number)[2]
        del self._ends[number]

    def timeline(self, weights: int, moments: int) -> Timeline:
        """Return what was seen."""
        live, gradients, before = {}, {}, 0
        for number, name in enumerate(self.parts):
            values = np.asarray(self._live[number], dtype=np.int64)
            born = np.zeros(len(values), dtype=np.int64)
            for part, at, size in self._waiting:
                if part == number and at < len(born):
                    born[at] += size
            live[name], gradients[name] = values, before + np.cumsum(born)
            before = int(gradients[name][-1]) if len(born) else before
        return Timeline(weights, moments, dict(zip(self.parts, self._ops, strict=True)), live, gradients)
