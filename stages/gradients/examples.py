"""Whole per-example gradients, one parameter at a time, from one batched pass: the exact reference path.

For what is not linear in the gradient (LESS divides by its own square) or must see every coordinate (a sketch). A
parameter's gradients of some documents are formed, handed to the caller and dropped, so that all examples' gradients
are never held together. Linear layers, embeddings and their bias are written out; any other module is differentiated
document by document. Shapes: D documents (one a row), d some of them, P a parameter's elements.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from transformers.pytorch_utils import Conv1D

from data_contracts.errors import ModelError
from stages.gradients.passes import FORMED_BYTES, TappedPass
from stages.gradients.taps import Call, owners
from stages.model.batch import TokenBatch
from stages.model.loss import plain

Take = Callable[[str, slice, Tensor], None]
"""Called with a parameter's name, some documents and their gradient_dP."""


class ExampleGradients(TappedPass):
    """A context that hands over each document's gradient of each trainable parameter, exactly once.

    Args:
        model: evaluated as it is (call `eval()` first); parameters with `requires_grad` count, all of them.
        autocast: dtype of the forward pass; gradients are handed over in at least float32.
        parameters: names of those that count instead; backward goes no deeper than the lowest of them.

    Raises `ModelError` in `of` where a parameter acts otherwise than through the module that owns it, or a module is
    called twice a pass or with other rows than the batch's tokens.
    """

    def __init__(
        self, model: nn.Module, *, autocast: torch.dtype | None = None, parameters: Collection[str] | None = None
    ) -> None:
        named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        if parameters is not None:
            named = {name: value for name, value in named.items() if name in parameters}
        self.parameters = {name: value.shape for name, value in named.items()}
        self.size = sum(value.numel() for value in named.values())
        self._owners = owners(model, named)
        self._head = plain(model).get_output_embeddings()
        count = Counter(name for own in self._owners.values() for name in own.values())
        late = {name for name, times in count.items() if times > 1} | set(self._owners.get(self._head, {}).values())
        self._late = late
        """Of several calls: a tied weight, and the head, which may see its rows in pieces."""
        super().__init__(model, self._owners, autocast=autocast)

    def of(self, batch: TokenBatch, take: Take) -> tuple[Tensor, Tensor]:
        """Hand every gradient of the summed answer losses to `take`; return loss_sum_D, answer_tokens_D.

        `take` is called while the pass runs, with (d, P) gradients; a parameter that no document reaches is absent.
        """
        self._take = take
        losses = self._pass(batch)
        for name, calls in self._calls.items():
            self._hand(name, calls)
        missed = sorted(set(self.parameters) - set(self._met))
        if missed and len(batch.answers.label_N):
            raise ModelError(
                "a trainable parameter acts through the module that owns it",
                f"{len(missed)} did not, the first is {missed[0]}",
                "freeze these parameters, or score with a method that reads no gradients",
            )
        self._calls.clear()
        return losses

    def _begin(self, batch: TokenBatch) -> None:
        assert not batch.packed, "per-example gradients need one document a row"
        self._batch = batch
        self._met: Counter[str] = Counter()
        self._calls: dict[str, list[tuple[Call, str]]] = defaultdict(list)

    def _visit(self, call: Call) -> None:
        for attribute, name in self._owners[call.module].items():
            self._met[name] += 1
            if name in self._late:
                self._calls[name].append((call, attribute))
            elif self._met[name] > 1:
                raise ModelError(
                    "a module with trainable parameters is called once a pass",
                    f"{name} is called twice",
                    "freeze it, or score with a method that reads no gradients",
                )
            else:
                self._hand(name, [(call, attribute)])

    def _hand(self, name: str, calls: list[tuple[Call, str]]) -> None:
        size = self.parameters[name].numel()
        documents, most = len(self._batch.example_ids), max(1, FORMED_BYTES // (4 * size))
        for start in range(0, documents, most):
            some = slice(start, min(start + most, documents))
            total = sum(self._formed(call, attribute, name, some) for call, attribute in calls)
            assert isinstance(total, Tensor)
            self._take(name, some, total)

    def _formed(self, call: Call, attribute: str, name: str, some: slice) -> Tensor:
        """Return one call's part of gradient_dP."""
        dtype = torch.promote_types(call.gradient.dtype, torch.float32)
        given, gradient = self._rows(call, name, some)
        gradient_dTo = gradient.to(dtype)
        forward = type(call.module).forward
        if forward in (nn.Linear.forward, Conv1D.forward):
            if attribute == "bias":
                return gradient_dTo.sum(dim=1)
            given_dTi = given.to(dtype)
            sides = (given_dTi, gradient_dTo) if forward is Conv1D.forward else (gradient_dTo, given_dTi)
            return torch.bmm(sides[0].mT, sides[1]).flatten(1)
        if forward is nn.Embedding.forward:
            padding: int | None = call.module.padding_idx  # type: ignore[assignment]
            kept = gradient_dTo if padding is None else gradient_dTo * torch.ne(given, padding)[..., None]
            rows = len(kept)
            found = kept.new_zeros(rows, *self.parameters[name])
            where = torch.arange(rows, device=given.device)[:, None].expand_as(given)
            return found.index_put_((where, given), kept, accumulate=True).flatten(1)
        return _differentiated(call, attribute, given, gradient).flatten(1).to(dtype)

    def _rows(self, call: Call, name: str, some: slice) -> tuple[Tensor, Tensor]:
        """Return what the call was given and its output gradient of some documents, a row each: (d, T, …)."""
        documents, length = self._batch.shape
        leading = call.gradient.shape[:-1]
        if leading.numel() == documents * length:
            width = call.given.shape[-1:] if call.given.is_floating_point() else ()
            return (
                call.given.reshape(documents, length, *width)[some],
                call.gradient.reshape(documents, length, -1)[some],
            )
        if leading[:2] == (documents, length) and not isinstance(call.module, nn.Linear | Conv1D):
            return call.given[some], call.gradient[some]  # a norm of each head, say
        found = self._batch.answers
        place = slice(call.start, call.start + leading[0])
        if call.module is not self._head or len(leading) != 1 or place.stop > len(found.label_N):
            raise ModelError(
                "a module with trainable parameters sees one row a token",
                f"{name} sees rows of shape {tuple(leading)} in a batch of {documents} x {length}",
                "freeze it, or score with a method that reads no gradients",
            )
        # the head sees answer tokens only: back to their places, with nothing elsewhere
        source_N = found.source_N[place]
        kept = (found.document_N[place] >= some.start) & (found.document_N[place] < some.stop)
        into_N = source_N[kept] - some.start * length
        shape = ((some.stop - some.start) * length, -1)
        given = call.given.new_zeros(shape[0], call.given.shape[-1]).index_copy_(0, into_N, call.given[kept])
        gradient = call.gradient.new_zeros(shape[0], call.gradient.shape[-1]).index_copy_(
            0, into_N, call.gradient[kept]
        )
        return given.view(-1, length, given.shape[-1]), gradient.view(-1, length, gradient.shape[-1])


def _differentiated(call: Call, attribute: str, given: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of each document by the module's own derivative; shape (d, *parameter.shape)."""
    value = getattr(call.module, attribute).detach()

    def one(given_T: Tensor, gradient_T: Tensor) -> Tensor:
        def output(parameter: Tensor) -> Tensor:
            found: Tensor = functional_call(
                call.module, {attribute: parameter}, (given_T, *call.rest), dict(call.named)
            )
            return found

        (found,) = vjp(output, value)[1](gradient_T)
        return found

    return vmap(one)(given, gradient)
