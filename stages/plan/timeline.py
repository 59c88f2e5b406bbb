"""What one optimizer step holds and does at every operator, seen without doing the work.

The real step runs on fake tensors (shapes without data) under a dispatch mode that follows every storage from birth to
death, so nothing is modelled: what autograd saves, what a kernel returns, what the optimizer allocates is counted as it
happens. Each phase is cut where the decoder's blocks begin and end. The scratch of the 8-bit update is known and
counted; other kernels' own scratch, fragmentation and the process itself are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from stages.meter.formulas import FORMULAS
from stages.model.shards import own
from stages.technique.states import scratch_bytes

PHASES = ("forward", "backward", "forward again", "backward again", "update")
"""Of a window of two micro-batches: the second meets the gradients that the first has left. Of a step that updates
inside the backward pass: its two passes."""
OWN = -1
"""Stands for the number of a storage that stays all the time."""
ACROSS = 30
"""How much longer a byte takes to main memory and back than in the device's own: 25 GB/s of the latter's 1.5 TB/s, each
copy being counted on both sides."""
BEFORE, AFTER = -1, -2
"""Places of what runs before the first block and after the last one."""

_CAST = torch.ops.aten._to_copy.default
_READ = torch.ops.aten._local_scalar_dense.default


@dataclass
class Stretch:
    """A part of a phase: one block's, or what lies before or after all of them.

    `ops`, `live`, `gradients`, `flops` and `moved` are alike in length: the operators, the bytes held after each
    beyond weights and moments, those of them that came up in this stretch and are gradients waiting for the update, the
    operations, and the bytes read and written. `start` and `end` are the bytes held at the borders; `released` those
    that came up here in a forward pass and were given up after its last block (weights that autocast keeps in
    bfloat16).
    """

    place: int
    start: int
    end: int | None = None
    released: int = 0
    ops: list[Any] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    gradients: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True)
class Timeline:
    """A traced step: stretches by phase in the order they ran, and the bytes held all the time.

    `block_weights` and `block_moments` are those of each block, `passes` the forward passes that a micro-batch takes.
    Of several that follow each other the last is here: before a backward pass it alone keeps activations.
    """

    weights: int
    moments: int
    block_weights: tuple[int, ...]
    block_moments: tuple[int, ...]
    passes: float
    stretches: dict[str, list[Stretch]]

    def with_update(self, other: Timeline) -> Timeline:
        """Return this step with the moments and the update of `other`, of as many layers."""
        stretches = {**self.stretches, PHASES[-1]: other.stretches[PHASES[-1]]}
        return replace(self, moments=other.moments, block_moments=other.block_moments, stretches=stretches)

    def peak(self, phase: str) -> int:
        """Return the most held in `phase`, weights and moments included."""
        return self.weights + self.moments + max(max(item.live, default=0) for item in self.stretches[phase])


def _tensors(items: Iterable[Any]) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)


@contextmanager
def _resizing(told: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Tell of every storage that is resized inside, which no dispatch mode sees."""
    real = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        found = real(storage, size)
        told(storage)
        return found

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = real  # type: ignore[method-assign]


@contextmanager
def _drawing(told: Callable[[Tensor], None]) -> Iterator[None]:
    """Tell of every copy of the generator's state, which no dispatch mode sees: a recomputed block keeps one."""
    real = torch.get_rng_state

    def get_rng_state() -> Tensor:
        found = real()
        told(found)
        return found

    torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = real


class StorageWatch(TorchDispatchMode):
    """Follow storages of one kind of device while a step runs; use as a context around it, inside a FakeTensorMode.

    Where a micro-batch is not passed forward whole before it is passed backward, its backward phase begins with the
    first operator that is, and goes on to the optimizer.
    """

    def __init__(self, device: str, *, whole: bool = True) -> None:
        super().__init__()
        self.phase, self._device, self._whole = 0, device, whole
        self._held = 0
        self._seen = WeakIdKeyDictionary()
        self._births: dict[int, tuple[int, Stretch, int, int]] = {}  # number -> (phase, stretch, operator, bytes)
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._number = 0
        self._stretches: list[list[Stretch]] = [[] for _ in PHASES]
        self._waiting: list[tuple[int, Stretch, int, int]] = []
        self._calls = 0

    def own(self, tensors: Iterable[Tensor]) -> int:
        """Take tensors that stay all the time (weights, moments) out of what is followed; return their bytes."""
        total = 0
        for tensor in tensors:
            storage = own(tensor).untyped_storage()
            if tensor.device.type == self._device and storage not in self._seen:
                self._seen[storage] = OWN
                total += storage.nbytes()
        return total

    @contextmanager
    def following(self, decoder: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Watch the step inside; each call of `decoder` starts a micro-batch, each of `blocks` a stretch."""

        def start(*_: Any) -> None:
            self._calls += 1
            if self.phase % 2:
                self.phase += 1
                self._begin(BEFORE)
            elif self._calls > 1:
                self._stretches[self.phase].clear()
                self._begin(BEFORE)

        def update(*_: Any) -> None:
            if self.phase in (0, 2) or (self.phase == 3 and not self._whole):
                self._update()

        self._begin(BEFORE)
        with ExitStack() as exits:
            exits.callback(decoder.register_forward_pre_hook(start).remove)
            exits.callback(register_optimizer_step_pre_hook(update).remove)
            for place, block in enumerate(blocks):
                exits.callback(block.register_forward_pre_hook(self._entering(place)).remove)
                exits.callback(block.register_forward_hook(self._leaving(place, len(blocks))).remove)
            exits.enter_context(_resizing(self._resized))
            exits.enter_context(_drawing(self._see))
            exits.enter_context(self)
            yield
            self._close()

    def _entering(self, place: int) -> Any:
        def enter(_: Any, arguments: tuple[Any, ...]) -> None:
            self._begin(place)
            hidden = next((item for item in arguments if isinstance(item, Tensor)), None)
            if place == 0 and hidden is not None and hidden.requires_grad:
                hidden.register_hook(lambda gradient: self._begin(BEFORE))

        return enter

    def _leaving(self, place: int, blocks: int) -> Any:
        def leave(_: Any, arguments: Any, out: Any) -> None:
            hidden = next(item for item in tree_leaves(out) if isinstance(item, Tensor))
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: self._begin(place))
            if place == blocks - 1:
                self._begin(AFTER)

        return leave

    def _begin(self, place: int) -> None:
        self._close()
        self._stretches[self.phase].append(Stretch(place, self._held))

    def _close(self) -> None:
        for items in reversed(self._stretches):
            if items and items[-1].end is None:
                items[-1].end = self._held
                return

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ:  # a norm or a loss that is asked for its value: fake tensors have none, and any will do
            return 1.0 if args[0].is_floating_point() else 1
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to this rank's part comes here next
        self._move(torch._C._current_autograd_node() is not None)
        out = func(*args, **(kwargs or {}))
        found = list(_tensors((out,)))
        for item in found:
            self._see(item)
        stretch = self._stretches[self.phase][-1]
        stretch.ops.append(func)
        inside = scratch_bytes(args[1].numel(), args[1].device.type) if func.namespace == "bitsandbytes" else 0
        if func.namespace == "c10d":  # gloo gathers and scatters through one tensor of all ranks' parts
            inside = max((t.numel() * t.element_size() for t in _tensors(args) if t.device.type == "cpu"), default=0)
        stretch.live.append(self._held + inside)
        if func.is_view:
            stretch.flops.append(0)
            stretch.moved.append(0)
            return out
        count = FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        raw = func._overloadpacket in FORMULAS
        shaped = [tuple(a.shape) if isinstance(a, Tensor) else a for a in args] if raw else args
        stretch.flops.append(int(count(*shaped, **({} if raw else {**(kwargs or {}), "out_val": out}))) if count else 0)
        given = _tensors((args, list((kwargs or {}).values())))
        items = [*given, *found]
        across = ACROSS if len({item.device.type for item in items if item.ndim}) > 1 else 1
        stretch.moved.append(across * sum(item.numel() * item.element_size() for item in items))
        return out

    def _move(self, in_backward: bool) -> None:
        if in_backward and self.phase in (0, 2):
            self.phase += 1
            self._begin(AFTER)
        elif not in_backward and self.phase == 3 and self._whole:
            self._update()

    def _update(self) -> None:
        self._waiting = [birth for birth in self._births.values() if birth[0] in (1, 3)]
        self.phase = 4
        self._begin(AFTER)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen or tensor.device.type != self._device:
            return
        self._born(storage)

    def _born(self, storage: torch.UntypedStorage) -> None:
        size, number = storage.nbytes(), self._number
        self._seen[storage] = number
        self._number += 1
        self._held += size
        stretch = self._stretches[self.phase][-1]
        self._births[number] = (self.phase, stretch, len(stretch.ops), size)
        self._ends[number] = weakref.ref(storage, lambda _: self._free(number))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage that was emptied or filled in place, as weights that are gathered are."""
        number = self._seen.get(storage)
        if number is None:
            self._born(storage)
        elif number != OWN:
            phase, stretch, at, size = self._births[number]
            self._births[number] = (phase, stretch, at, storage.nbytes())
            self._held += storage.nbytes() - size

    def _free(self, number: int) -> None:
        phase, stretch, at, size = self._births.pop(number)
        self._held -= size
        now = self._stretches[self.phase][-1]
        cast = at < len(stretch.ops) and stretch.ops[at] is _CAST  # all else is the last blocks' own
        if self.phase == phase and stretch.place >= 0 and now.place == AFTER and cast:
            stretch.released += size
        del self._ends[number]

    def timeline(self, weights: int, moments: int, blocks: Sequence[tuple[int, int]]) -> Timeline:
        """Return what was seen; `blocks` are (weights, moments) of each."""
        for items in self._stretches:
            for stretch in items:
                born = np.zeros(len(stretch.ops), dtype=np.int64)
                for _, owner, at, size in self._waiting:
                    if owner is stretch:
                        born[at] += size
                stretch.gradients = np.cumsum(born)
        own, states = zip(*blocks, strict=True) if blocks else ((), ())
        found = dict(zip(PHASES, self._stretches, strict=True))
        if not found["backward"]:  # forward passes alone: the second micro-batch's are those of the first
            found["forward again"] = found["forward"]
        return Timeline(weights, moments, tuple(own), tuple(states), max(1.0, self._calls / 2), found)
