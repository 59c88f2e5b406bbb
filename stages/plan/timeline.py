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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

PHASES = ("forward", "backward", "forward again", "backward again", "update")
"""Of a window of two micro-batches: the second meets the gradients that the first has left."""

_READ = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True)
class Timeline:
    """Bytes held after each operator, by phase.

    `ops[p]`, `live[p]` and `gradients[p]` are alike in length: the operators' names, all bytes held beyond weights and
    moments, and those of them that are gradients waiting for the update.
    """

    weights: int
    moments: int
    ops: dict[str, list[str]]
    live: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


class StorageWatch(TorchDispatchMode):
    """Follow storages while a step runs; use as a context around it, inside a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = 0
        self._held = 0
        self._seen = WeakIdKeyDictionary()
        self._births: dict[int, tuple[int, int, int]] = {}  # storage number -> (phase, operator, bytes)
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._number = 0
        self._ops: list[list[str]] = [[] for _ in PHASES]
        self._live: list[list[int]] = [[] for _ in PHASES]
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
        """Watch the step inside; each call of `decoder` starts a micro-batch."""
        calls = 0

        def start(*_: Any) -> None:
            nonlocal calls
            self.phase, calls = 2 * calls, calls + 1

        handle = decoder.register_forward_pre_hook(start)
        try:
            with self:
                yield
        finally:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ:  # a norm or a loss that is asked for its value: fake tensors have none, and any will do
            return 1.0 if args[0].is_floating_point() else 1
        self._move(torch._C._current_autograd_node() is not None)
        out = func(*args, **(kwargs or {}))
        for item in tree_leaves(out):
            if isinstance(item, Tensor):
                self._see(item)
        self._ops[self.phase].append(str(func))
        self._live[self.phase].append(self._held)
        return out

    def _move(self, in_backward: bool) -> None:
        if in_backward and self.phase in (0, 2):
            self.phase += 1
        elif not in_backward and self.phase == 3:
            self.phase = 4
            self._waiting = [birth for birth in self._births.values() if birth[0] in (1, 3)]

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen[storage] = True
        size, number = storage.nbytes(), self._number
        self._number += 1
        self._held += size
        self._births[number] = (self.phase, len(self._ops[self.phase]), size)
        self._ends[number] = weakref.ref(storage, lambda _: self._free(number))

    def _free(self, number: int) -> None:
        self._held -= self._births.pop(number)[2]
        del self._ends[number]

    def timeline(self, weights: int, moments: int) -> Timeline:
        """Return what was seen."""
        live, gradients, before = {}, {}, 0
        for number, name in enumerate(PHASES):
            values = np.asarray(self._live[number], dtype=np.int64)
            born = np.zeros(len(values), dtype=np.int64)
            for phase, at, size in self._waiting:
                if phase == number and at < len(born):
                    born[at] += size
            live[name], gradients[name] = values, before + np.cumsum(born)
            before = int(gradients[name][-1]) if len(born) else before
        return Timeline(weights, moments, dict(zip(PHASES, self._ops, strict=True)), live, gradients)
