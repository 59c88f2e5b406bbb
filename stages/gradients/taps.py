"""Taps: see the input and the output gradient of every module that owns a parameter of interest.

A tap is an identity in the graph: forward it keeps the module's input (through `save_for_backward`, so activation
checkpointing and offloading treat it like any saved tensor), backward it hands input and output gradient to a visitor
and passes the gradient on. Weight gradients are never formed, and backward goes no deeper than the lowest tapped
module. What is computed from the pair is left to the visitor (see `inner_product.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from data_contracts.errors import ModelError


@dataclass(frozen=True)
class Call:
    """One call of a tapped module: what it was given and the gradient of the loss by what it returned.

    `given` is the first input, (B, T, i) or (N, i), or token ids (B, T) for an embedding; `gradient` is (B, T, o) or
    (N, o); `start` is how many rows the module had been given in this batch before. `rest` and `named` hold the call's
    other arguments.
    """

    module: nn.Module
    given: Tensor
    gradient: Tensor
    start: int
    rest: tuple[Any, ...]
    named: Mapping[str, Any]


Visitor = Callable[[Call], None]


class _Tap(torch.autograd.Function):
    """Identity whose backward shows (input, output gradient) to a visitor."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, anchor: Tensor, given: Tensor, show: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(given)
        ctx.show = show
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None, None]:
        (given,) = ctx.saved_tensors
        ctx.show(given, gradients[0])
        return (gradients[0] if ctx.needs_input_grad[0] else None), None, None, None


def owners(model: nn.Module, parameters: Iterable[str]) -> dict[nn.Module, dict[str, str]]:
    """Return, for each module that directly owns one of `parameters`, its attribute names and the parameters' names.

    A tied weight has one name in `model.named_parameters()` and several owners: all are returned.
    """
    wanted = set(parameters)
    named = {id(parameter): name for name, parameter in model.named_parameters() if name in wanted}
    found: dict[nn.Module, dict[str, str]] = {}
    for module in model.modules():
        own = {
            attribute: named[id(parameter)]
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) in named
        }
        if own:
            found[module] = own
    return found


class Taps:
    """A context in which no weight gradient is computed and every call of the tapped modules is shown to `visit`.

    Args:
        model: the model; its `requires_grad` flags are all off inside the context and restored on leaving it.
        modules: those to tap (see `owners`).
        visit: called in backward order, once for each call of a module that the loss depends on.

    Call `begin(rows)` before each forward pass.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module], visit: Visitor) -> None:
        self._model, self._modules, self._visit = model, list(modules), visit
        self._handles: list[Any] = []
        self._flags: list[tuple[nn.Parameter, bool]] = []
        self._open = True
        self._rows = 1
        self._given: dict[nn.Module, int] = {}

    def begin(self, rows: int) -> None:
        """Announce a batch of `rows` rows, so that what is shared by its rows (position ids) is given one row each."""
        self._rows, self._given = rows, {}

    def __enter__(self) -> Taps:
        self._flags = [(parameter, parameter.requires_grad) for parameter in self._model.parameters()]
        for parameter, _ in self._flags:
            parameter.requires_grad_(False)
        self._handles = [module.register_forward_hook(self._hook, with_kwargs=True) for module in self._modules]
        self._handles += [
            m.register_forward_pre_hook(self._spread) for m in self._modules if isinstance(m, nn.Embedding)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        self._handles, self._flags = [], []

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        if not self._open or not torch.is_grad_enabled():
            return None
        first, rest, named = _split(args, kwargs)
        if not isinstance(output, Tensor) or not isinstance(first, Tensor):
            raise ModelError(
                "a module with trainable parameters maps one tensor to one tensor",
                f"{type(module).__name__} does not",
                "freeze its parameters, or score with a method that reads no gradients",
            )

        def show(given: Tensor, gradient: Tensor) -> None:
            self._open = False  # the visitor may call the module again
            try:
                self._visit(Call(module, given, gradient, start, rest, named))
            finally:
                self._open = True

        start = self._given.get(module, 0)
        self._given[module] = start + first.shape[0]
        anchor = torch.zeros((), device=output.device, requires_grad=True)
        return _Tap.apply(output, anchor, first.detach(), show)

    def _spread(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Repeat ids that all rows share: one output for several rows would have only the sum of their gradients."""
        if args and isinstance(args[0], Tensor) and args[0].dim() == 2 and args[0].shape[0] == 1 < self._rows:
            return (args[0].expand(self._rows, -1), *args[1:])
        return None


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], dict(kwargs)
    named = dict(kwargs)
    for name in ("input", "x", "hidden_states"):
        if name in named:
            return named.pop(name), (), named
    return None, (), named
