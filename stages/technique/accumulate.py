"""Gradients as a backward pass produces them, one parameter at a time: added up, measured, or used up at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from stages.model.shards import own


class Gradient:
    """Running gradient sums. Each micro-batch's gradient is measured and added one parameter at a time, as backward
    produces it, so that its norm costs no second copy of all gradients; without `keep` it is measured alone."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._norms: dict[nn.Parameter, Tensor] = {}
        self.micro_square = torch.zeros((), dtype=torch.float64)

    def take(self, parameter: nn.Parameter) -> None:
        """Take the gradient of `parameter` over and leave it without one."""
        fresh = parameter.grad
        if fresh is None:
            return
        parameter.grad = None
        norm = torch.linalg.vector_norm(own(fresh)).double()
        self.micro_square = self.micro_square + norm.square()
        if not self._keep:
            self._norms[parameter] = norm
            return
        known = self._sums.get(parameter)
        if known is None:
            self._sums[parameter] = fresh.detach()
        else:
            known.add_(fresh)

    def sums(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return one sum a parameter in order; zeros where no micro-batch reached it."""
        return [self._sums[item] if item in self._sums else torch.zeros_like(item) for item in parameters]

    def square(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the squared norm of a gradient that was not kept, added up in the order of `parameters`."""
        zero = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
        return torch.stack([self._norms.get(item, zero) for item in parameters]).square().sum()


@contextmanager
def accumulating(parameters: Sequence[nn.Parameter], *, keep: bool) -> Iterator[Gradient]:
    """Take every gradient that backward passes inside produce; see `Gradient`."""
    gradient = Gradient(keep)
    with _hooked(parameters, gradient.take):
        yield gradient


@contextmanager
def _hooked(parameters: Sequence[nn.Parameter], take: Callable[[nn.Parameter], None]) -> Iterator[None]:
    handles = [item.register_post_accumulate_grad_hook(take) for item in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def updating(
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    factor: float,
    measured: Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]] | None = None,
) -> Iterator[None]:
    """Update each parameter inside the backward pass, as soon as its gradient is whole; zeros are one that none comes
    for, so that moments decay as they do in a plain step. `measured` is a context that each update is made in."""
    missing = set(parameters)
    around = measured or (lambda _: nullcontext())

    def update(parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return
        parameter.grad.mul_(factor)
        with around([parameter]):
            optimizer.step()  # no other parameter has a gradient
        parameter.grad = None
        missing.discard(parameter)

    with _hooked(parameters, update):
        yield
    for parameter in parameters:
        if parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
            with around([parameter]):
                optimizer.step()
            parameter.grad = None
