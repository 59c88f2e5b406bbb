"""Inner products of per-example gradients with fixed directions, without ever forming a per-example gradient.

For a linear layer with inputs a and output gradients b, the gradient of one document is Σ_t b_t a_tᵀ, so its product
with a direction V is Σ_t b_tᵀ V a_t: one matrix product the size of the weight gradient that training would compute.
For several directions the document's gradient of one layer is formed inside the batch and multiplied once, where that
takes fewer operations; directions given as thin factors (`low_rank.py`) are contracted through those. Every other
module is differentiated along V, so all of them are exact.
Shapes: D documents, J directions, B rows, T positions, N rows given to a layer, i and o a layer's inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from data_contracts.errors import ModelError
from stages.gradients.low_rank import Factors, contract
from stages.gradients.passes import FORMED_BYTES, TappedPass
from stages.gradients.taps import Call, owners
from stages.model.batch import TokenBatch
from stages.model.loss import plain


@dataclass(frozen=True)
class Products:
    """What one forward and backward pass over a batch gave.

    Attributes:
        product_DJ: float64, ⟨gradient of document d's *summed* answer loss, direction j⟩.
        loss_sum_D: nats, summed over the document's answer tokens.
        answer_tokens_D: int64.
    """

    product_DJ: Tensor
    loss_sum_D: Tensor
    answer_tokens_D: Tensor


@dataclass(frozen=True)
class _Places:
    """Where the rows given to a layer stand: flat positions (None: all of them) and the runs of each document."""

    index_N: Tensor | None
    runs: list[tuple[int, int, int]]  # (document, first row, one past the last row)


class InnerProducts(TappedPass):
    """A context that scores batches against fixed directions.

    Args:
        model: evaluated as it is (call `eval()` first: dropout would make the products random).
        directions: parameter name (as in `model.named_parameters()`) to a tensor (J, *parameter.shape). A parameter
            that is not named takes no part, and backward goes no deeper than the lowest named one.
        factors: weights of linear layers whose directions are given so instead, each with the same J.
        autocast: dtype of the forward pass; None computes in the weights' own. Products add up in float64 either way.
        beside: another that is shown the same passes (see `TappedPass`).

    Raises `ModelError` in `of` where a named parameter is used other than by calling the module that owns it, or by a
    module whose rows are not the batch's tokens: what could not be counted is never left out silently.
    """

    def __init__(
        self,
        model: nn.Module,
        directions: Mapping[str, Tensor],
        *,
        factors: Mapping[str, Factors] | None = None,
        autocast: torch.dtype | None = None,
        beside: TappedPass | None = None,
    ) -> None:
        self._factors = dict(factors or {})
        counts = [value.shape[0] for value in directions.values()] + [len(f.bounds) - 1 for f in self._factors.values()]
        self.groups = counts[0] if counts else 0
        self.extra_flops = 0
        """Operations beyond those of training's weight gradients; thin factors take fewer, and make this negative."""
        self._directions = dict(directions)
        self._owners = owners(model, [*directions, *self._factors])
        super().__init__(model, self._owners, autocast=autocast, beside=beside)
        self._head = plain(model).get_output_embeddings()
        self._seen: set[str] = set()
        self._checked = False

    def of(self, batch: TokenBatch) -> Products:
        """Return the products of every document of `batch`; one forward and one backward pass."""
        documents, device = len(batch.example_ids), batch.input_ids_BT.device
        loss_sum_D, answer_tokens_D = self._pass(batch)
        self._check()
        owner = batch.document_BT.flatten()
        totals = torch.zeros(documents + 1, self.groups, dtype=torch.float64, device=device)
        totals.index_add_(0, torch.where(owner < 0, documents, owner), self._positions)
        return Products(totals[:documents] + self._formed, loss_sum_D, answer_tokens_D)

    def _begin(self, batch: TokenBatch) -> None:
        rows, length = batch.shape
        device = batch.input_ids_BT.device
        self._batch, documents = batch, len(batch.example_ids)
        self._positions = torch.zeros(rows * length, self.groups, dtype=torch.float64, device=device)
        self._formed = torch.zeros(documents, self.groups, dtype=torch.float64, device=device)
        self._everywhere = _Places(None, _runs(batch.document_BT.flatten()))
        self._answers = _Places(batch.answers.source_N, _runs(batch.answers.document_N))

    def _check(self) -> None:
        """After the first batch with an answer: every named parameter was met."""
        if self._checked or not len(self._batch.answers.label_N):
            return
        missed = sorted({*self._directions, *self._factors} - self._seen)
        if missed:
            raise ModelError(
                "a trainable parameter acts through the module that owns it",
                f"{len(missed)} did not, the first is {missed[0]}",
                "freeze these parameters, or score with a method that reads no gradients",
            )
        self._checked = True

    def _visit(self, call: Call) -> None:
        own = self._owners[call.module]
        self._seen.update(own.values())
        direction = {a: self._directions[name] for a, name in own.items() if name in self._directions}
        places = self._places(call)
        forward = type(call.module).forward
        if forward in (nn.Linear.forward, Conv1D.forward):
            given_Ni, gradient_No = call.given.flatten(0, -2), call.gradient.flatten(0, -2)
            if "bias" in direction:
                self._add(places, gradient_No.to(direction["bias"].dtype) @ direction["bias"].T)
            if (factors := self._factors.get(own.get("weight", ""))) is not None:
                count, (outputs, inputs) = len(given_Ni), (factors.left_oR.shape[0], factors.right_Ri.shape[1])
                self.extra_flops += factors.flops(count) - 2 * count * outputs * inputs
                self._add(places, contract(factors, given_Ni, gradient_No))
            elif "weight" in direction:
                weight_Joi = direction["weight"]
                if forward is Conv1D.forward:
                    weight_Joi = weight_Joi.transpose(1, 2)
                self._linear(places, weight_Joi, given_Ni, gradient_No)
            return
        if forward is nn.Embedding.forward:
            tangents = [functional.embedding(call.given, one) for one in direction["weight"]]
        else:
            tangents = _tangents(call, direction, self.groups)
        count = len(self._positions) if places.index_N is None else len(places.index_N)
        columns = [_dot(call.gradient, tangent).reshape(count, -1).sum(dim=1) for tangent in tangents]
        self._add(places, torch.stack(columns, dim=1) * _kept(call, count)[:, None])

    def _places(self, call: Call) -> _Places:
        """Find which tokens the rows of a call are. Raises `ModelError` where they are no tokens of the batch."""
        rows, length = self._batch.shape
        leading = tuple(call.gradient.shape[:-1])
        if call.module is self._head and len(leading) == 1:
            source_N, whole = self._answers.index_N, len(self._batch.answers.label_N)
            assert source_N is not None
            if call.start == 0 and leading[0] == whole:
                return self._answers
            piece = slice(call.start, call.start + leading[0])
            if piece.stop <= whole:
                return _Places(source_N[piece], _runs(self._batch.answers.document_N[piece]))
        elif leading in ((rows, length), (rows * length,)):
            return self._everywhere
        elif leading[:2] == (rows, length) and type(call.module).forward not in (nn.Linear.forward, Conv1D.forward):
            return self._everywhere  # a norm of each head, say: several rows a token, which add up
        raise ModelError(
            "a module with trainable parameters sees one row a token",
            f"{type(call.module).__name__} sees rows of shape {leading} in a batch of {rows} x {length}",
            "freeze its parameters, or score with a method that reads no gradients",
        )

    def _linear(self, places: _Places, weight_Joi: Tensor, given_Ni: Tensor, gradient_No: Tensor) -> None:
        count, documents = len(given_Ni), len(places.runs)
        size = weight_Joi[0].numel()
        contracting = 2 * count * size * self.groups
        forming = 2 * count * size + 2 * documents * size * self.groups
        if contracting <= forming:
            self.extra_flops += contracting - 2 * count * size
            self._add(places, torch.stack([_contract(one, given_Ni, gradient_No) for one in weight_Joi], dim=1))
            return
        self.extra_flops += forming - 2 * count * size
        self._form(places, weight_Joi.reshape(self.groups, -1), given_Ni, gradient_No)

    def _form(self, places: _Places, flat_JP: Tensor, given_Ni: Tensor, gradient_No: Tensor) -> None:
        """Form one layer's gradient for a few documents at a time and multiply it by all directions at once."""
        most = max(1, FORMED_BYTES // (4 * flat_JP.shape[1]))
        given_Ni = given_Ni.to(gradient_No.dtype)
        for at in range(0, len(places.runs), most):
            some = places.runs[at : at + most]
            formed_dP = torch.stack([(gradient_No[a:z].T @ given_Ni[a:z]).flatten() for _, a, z in some])
            owner = torch.tensor([document for document, _, _ in some], device=formed_dP.device)
            self._formed.index_add_(0, owner, (formed_dP.to(flat_JP.dtype) @ flat_JP.T).double())

    def _add(self, places: _Places, values_NJ: Tensor) -> None:
        if places.index_N is None:
            self._positions += values_NJ
        else:
            self._positions.index_add_(0, places.index_N, values_NJ.double())


def _runs(document_N: Tensor) -> list[tuple[int, int, int]]:
    """Return (document, start, end) of each run of equal non-negative document numbers."""
    values, counts = torch.unique_consecutive(document_N.cpu(), return_counts=True)
    ends = counts.cumsum(0).tolist()
    return [
        (document, end - count, end)
        for document, end, count in zip(values.tolist(), ends, counts.tolist(), strict=True)
        if document >= 0
    ]


def _contract(weight_oi: Tensor, given_Ni: Tensor, gradient_No: Tensor) -> Tensor:
    """Return b_tᵀ V a_t of each row; the smaller of the two sides is the one held."""
    dtype = gradient_No.dtype
    outputs, inputs = weight_oi.shape
    if outputs >= inputs:
        return _dot(gradient_No @ weight_oi.to(dtype), given_Ni)
    return _dot(given_Ni.to(dtype) @ weight_oi.T.to(dtype), gradient_No)


def _dot(left_NK: Tensor, right_NK: Tensor) -> Tensor:
    """Return the row-wise dot product in at least float32."""
    dtype = torch.promote_types(torch.promote_types(left_NK.dtype, right_NK.dtype), torch.float32)
    return torch.linalg.vecdot(left_NK.to(dtype), right_NK.to(dtype))


def _kept(call: Call, count: int) -> Tensor:
    """Return 0 where an embedding is defined to pass no gradient (its padding id), else 1; shape (count)."""
    padding = getattr(call.module, "padding_idx", None)
    if padding is None or call.given.is_floating_point():
        return torch.ones(count, dtype=torch.float32, device=call.gradient.device)
    return (call.given.flatten() != padding).to(torch.float32)


def _tangents(call: Call, direction: dict[str, Tensor], groups: int) -> list[Tensor]:
    """Return the derivative of the module's output along each direction, its input held fixed.

    The backward pass is linear in the output gradient u, and its derivative by u along the direction is the tangent: no
    forward-mode rules, whose first use costs a process 0.4 to 0.9 s; and two to three times as fast (RMSNorm, CPU).
    """
    module = call.module
    values = {name: getattr(module, name).detach().requires_grad_() for name in direction}
    with torch.enable_grad():
        output = functional_call(module, values, (call.given, *call.rest), dict(call.named))
        probe = torch.zeros_like(output, requires_grad=True)
        backward = torch.autograd.grad(output, list(values.values()), probe, create_graph=True)
        along_J = [
            torch.stack([(b * direction[n][group].to(b)).sum() for n, b in zip(values, backward, strict=True)]).sum()
            for group in range(groups)
        ]
    return [torch.autograd.grad(along, probe, retain_graph=True)[0] for along in along_J]
