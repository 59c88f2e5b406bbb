"""A step that memory may run out in: noted before anything is updated, so that it can be told on every rank and made
again as if for the first time, generators included. Into what parts it is cut then is training's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from stages.ending import out_of_memory

AllReduce = Callable[[Sequence[Tensor]], None]
"""Sums each tensor over all ranks, in place, with the same bytes on every rank."""


class ShortOfMemoryError(Exception):
    """Memory ran out, on this rank or another, before anything was updated: the step can be made in smaller parts."""


@contextmanager
def noted() -> Iterator[list[Exception]]:
    """Keep an error that says that memory ran out, instead of raising it: the other ranks must learn of it first."""
    found: list[Exception] = []
    try:
        yield found
    except Exception as error:
        if not out_of_memory(error):
            raise
        found.append(error.with_traceback(None))  # its frames hold the tensors that there was no room for


Generators = list[tuple[Callable[[Tensor], None], Tensor]]


def generators(device: torch.device) -> Generators:
    """Return the states of the generators that a pass on `device` draws from, each with what sets it."""
    found: Generators = [(torch.set_rng_state, torch.get_rng_state())]
    if device.type == "cuda":
        found.append((lambda state: torch.cuda.set_rng_state(state, device), torch.cuda.get_rng_state(device)))
    return found


def restore(states: Generators) -> None:
    """Put back what `generators` returned."""
    for put, state in states:
        put(state)
