"""Inner products of every row's gradient with one direction, read from the backward pass that training runs anyway.

A linear layer's weight gradient is formed a document at a time instead of all at once, the same multiplications; each
part is multiplied with the direction and the parts are added up, which is what the optimizer gets. So a product costs
two passes over a formed gradient, not another matrix product. Where documents have too few rows for that, and for what
an embedding looks up, the direction is contracted with what passes by. Counted are weights and biases of linear layers
and embeddings; other parameters (the scales of norms) train as ever and take no part.
Shapes: D documents, N rows given to a layer, B rows of a batch, T positions, i and o a layer's inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from data_contracts.errors import ModelError
from stages.gradients.passes import FORMED_BYTES
from stages.gradients.taps import owners
from stages.model.batch import TokenBatch
from stages.model.loss import plain

LEAST_ROWS = 24
"""Rows a document from which its gradient is formed: what is formed is written, multiplied and added up, which cost as
much as contracting 10 rows for a layer of 3 MB and 27 for one of 16 MB (float32, one core)."""
CACHED_BYTES = 2**20
"""Of the gradients formed at once on a CPU: from its cache, a batch of eight cost 7 to 15 % more than the layer's
weight gradient alone; 64 MB at once, 25 to 45 % more."""
LINEAR = (nn.Linear.forward, Conv1D.forward)


def covered(model: nn.Module) -> list[str]:
    """Return the names of the trainable parameters that `RowProducts` counts.

    A parameter counts where each module that owns it is a linear layer or an embedding, called as torch defines it.
    """
    found = owners(model, [name for name, parameter in model.named_parameters() if parameter.requires_grad])
    known = {name for module, own in found.items() if _kind(module) for name in own.values()}
    return sorted(known - {name for module, own in found.items() if not _kind(module) for name in own.values()})


def _kind(module: nn.Module) -> str:
    if "forward" in vars(module):  # another library's wrapper: what it computes is not known
        return ""
    forward = type(module).forward
    return "linear" if forward in LINEAR else "embedding" if forward is nn.Embedding.forward else ""


class RowProducts:
    """A context inside which training's backward passes also give ⟨gradient of each document's loss, direction⟩.

    Args:
        model: trains as ever inside: every parameter gets the gradient it would get, up to the order of the sum.
        direction: parameter name (of `covered(model)`) to a tensor of the parameter's shape.

    Call `begin(batch)` before a forward pass and `take()` after its backward pass. `extra_flops` counts operations that
    training alone would not do. Raises `ModelError` in the forward pass where a layer sees other rows than the batch's
    tokens.
    """

    def __init__(self, model: nn.Module, direction: Mapping[str, Tensor]) -> None:
        self.direction = {name: value.contiguous() for name, value in direction.items()}
        self._owners = owners(model, direction)
        self._head = plain(model).get_output_embeddings()
        self._exits = ExitStack()
        self.extra_flops = 0

    def __enter__(self) -> RowProducts:
        for module, own in self._owners.items():
            if _kind(module) == "linear":
                module.forward = partial(self._linear, module, own)
                self._exits.callback(delattr, module, "forward")
            else:
                spread = module.register_forward_pre_hook(self._spread)
                looked_up = module.register_forward_hook(partial(self._embedding, own["weight"]))
                self._exits.callback(spread.remove)
                self._exits.callback(looked_up.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def begin(self, batch: TokenBatch) -> None:
        """Announce the batch of the next forward pass."""
        self._shape, self._packed = batch.shape, batch.packed
        self._documents = len(batch.example_ids)
        self._owner_N = batch.document_BT.flatten()
        self._tokens = _spans(self._owner_N, self._documents)
        self._answers = _spans(batch.answers.document_N, self._documents)
        self._answer_owner_N = batch.answers.document_N
        self._given: dict[nn.Module, int] = {}
        self._product_D = torch.zeros(self._documents, dtype=torch.float64, device=self._owner_N.device)

    def take(self) -> Tensor:
        """Return product_D, float64, of each document's part of the loss that was differentiated since `begin`."""
        return self._product_D

    def _linear(self, module: nn.Module, own: Mapping[str, str], given: Tensor) -> Tensor:
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        if isinstance(module, Conv1D):
            weight = weight.T
        kind = given.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            given, weight = given.to(dtype), weight.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        if not torch.is_grad_enabled():
            return functional.linear(given, weight, bias)
        output: Tensor = _RowLinear.apply(given, weight, bias, self._seen_by(module, own, given))
        return output

    def _seen_by(
        self, module: nn.Module, own: Mapping[str, str], given: Tensor
    ) -> Callable[[Tensor, Tensor], Tensor | None]:
        """Return what forms the layer's weight gradient (o, i) from its input and output gradient."""
        spans, owner_N = self._rows_of(module, given)
        weight_oi = self.direction.get(own.get("weight", ""))
        if weight_oi is not None and isinstance(module, Conv1D):
            weight_oi = weight_oi.T.contiguous()
        bias_o = self.direction.get(own.get("bias", ""))

        def show(given: Tensor, gradient: Tensor) -> Tensor | None:
            given_Ni, gradient_No = given.flatten(0, -2), gradient.flatten(0, -2)
            if bias_o is not None:
                self._add(owner_N, gradient_No @ bias_o.to(gradient.dtype))
            if weight_oi is None:
                return gradient_No.T @ given_Ni if module.weight.requires_grad else None
            filled = [span for span in spans if span[1] > span[0]]
            if given_Ni.shape[0] < LEAST_ROWS * len(filled):
                self.extra_flops += 2 * given_Ni.shape[0] * weight_oi.numel()
                self._add(owner_N, _dot(gradient_No, given_Ni @ weight_oi.T.to(given.dtype)))
                return gradient_No.T @ given_Ni
            self.extra_flops += 3 * len(filled) * weight_oi.numel()
            if spans is self._tokens and not self._packed:
                rows = self._shape[0]
                return self._formed(given_Ni.unflatten(0, (rows, -1)), gradient_No.unflatten(0, (rows, -1)), weight_oi)
            return self._formed_by_span(spans, given_Ni, gradient_No, weight_oi)

        return show

    def _formed(self, given_DTi: Tensor, gradient_DTo: Tensor, weight_oi: Tensor) -> Tensor:
        """One document a row: the gradients of some documents at a time by one batched product, in one buffer."""
        documents, inputs, outputs = len(given_DTi), given_DTi.shape[2], gradient_DTo.shape[2]
        most = max(1, (FORMED_BYTES if given_DTi.is_cuda else CACHED_BYTES) // (4 * weight_oi.numel()))
        buffer_dP = given_DTi.new_empty(min(most, documents), outputs * inputs)
        total_P = given_DTi.new_zeros(outputs * inputs)
        for at in range(0, documents, most):
            some = slice(at, min(at + most, documents))
            formed_dP = buffer_dP[: some.stop - at]
            torch.bmm(gradient_DTo[some].mT, given_DTi[some], out=formed_dP.view(-1, outputs, inputs))
            self._product_D[some] += (formed_dP.to(weight_oi.dtype) @ weight_oi.flatten()).double()
            total_P.add_(formed_dP[0] if len(formed_dP) == 1 else formed_dP.sum(dim=0))
        return total_P.view_as(weight_oi)

    def _formed_by_span(
        self, spans: list[tuple[int, int]], given_Ni: Tensor, gradient_No: Tensor, weight_oi: Tensor
    ) -> Tensor:
        buffer_oi, total_oi = (torch.zeros_like(weight_oi, dtype=given_Ni.dtype) for _ in range(2))
        for document, (start, stop) in enumerate(spans):
            if stop > start:
                torch.mm(gradient_No[start:stop].T, given_Ni[start:stop], out=buffer_oi)
                self._product_D[document] += _dot(buffer_oi.flatten(), weight_oi.flatten())
                total_oi.add_(buffer_oi)
        return total_oi

    def _rows_of(self, module: nn.Module, given: Tensor) -> tuple[list[tuple[int, int]], Tensor]:
        """Return where each document's rows stand among those of a call, and every row's document."""
        count, leading = given.shape[:-1].numel(), tuple(given.shape[:-1])
        if module is self._head and given.dim() == 2:
            whole = len(self._answer_owner_N)
            start = self._given.get(module, 0)
            start = start if start < whole else 0  # computed again in the backward pass, where no span is asked for
            stop = self._given[module] = start + count
            if stop <= whole:
                spans = [(min(max(a - start, 0), count), min(max(z - start, 0), count)) for a, z in self._answers]
                return spans, self._answer_owner_N[start:stop]
        elif leading in (self._shape, (len(self._owner_N),)):
            return self._tokens, self._owner_N
        raise ModelError(
            "a layer that trains sees one row a token while influence is read in training",
            f"{type(module).__name__} sees rows of shape {leading} in a batch of {self._shape[0]} x {self._shape[1]}",
            "unset `train.influence`, or freeze the layer",
        )

    def _embedding(self, name: str, module: nn.Embedding, args: tuple[Any, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        ids_N, owner_N = args[0].flatten(), self._owner_N

        def show(gradient: Tensor) -> None:
            product_N = _dot(gradient.flatten(0, -2), functional.embedding(ids_N, self.direction[name]))
            if module.padding_idx is not None:  # passes no gradient, by definition
                product_N = product_N.masked_fill(ids_N == module.padding_idx, 0.0)
            self._add(owner_N, product_N)

        self.extra_flops += 2 * output.numel()
        output.register_hook(show)

    def _spread(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Repeat ids that all rows share (positions): one output for several rows has the sum of their gradients."""
        rows = self._shape[0]
        return (args[0].expand(rows, -1), *args[1:]) if args and args[0].shape[0] == 1 < rows else None

    def _add(self, owner_N: Tensor, value_N: Tensor) -> None:
        real_N = owner_N >= 0
        self._product_D.index_add_(0, owner_N.clamp_min(0), value_N.double() * real_N)


class _RowLinear(torch.autograd.Function):
    """A linear layer whose weight gradient is made by whoever is shown (input, output gradient)."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, show: Callable[[Tensor, Tensor], Tensor | None]
    ) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.show = show
        return functional.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        given, weight = ctx.saved_tensors
        (gradient,) = gradients
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            ctx.show(given, gradient),
            gradient.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[2] else None,
            None,
        )


def _spans(document_N: Tensor, documents: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each document's rows, which follow one another; -1 belongs to none."""
    real_N = document_N >= 0
    counts_D = torch.bincount(document_N[real_N], minlength=documents)
    place_N = torch.arange(len(document_N), device=document_N.device)[real_N]
    first_D = torch.full((documents,), len(document_N), device=document_N.device)
    first_D.scatter_reduce_(0, document_N[real_N], place_N, "amin")
    return [(a, a + n) if n else (0, 0) for a, n in zip(first_D.tolist(), counts_D.tolist(), strict=True)]


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the dot product over the last dimension in at least float32."""
    dtype = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
    return torch.linalg.vecdot(left.to(dtype), right.to(dtype))
