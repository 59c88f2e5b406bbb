"""Norms of per-example gradients over the linear layers, without ever holding an example's whole gradient.

A linear layer with inputs a and output gradients b has the gradient Σ_t b_t a_tᵀ, whose squared norm is
Σ_{t,s} ⟨a_t, a_s⟩⟨b_t, b_s⟩: the gradient is formed, or two T x T Gram matrices are, whichever is cheaper.
Counted are trainable weights and biases of linear layers, adapters too; not the output head, nor a weight that an
embedding shares. Shapes: D documents (one a row), T positions, i and o a layer's inputs and outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from data_contracts.errors import ModelError
from stages.gradients.passes import FORMED_BYTES, TappedPass, decoder_linears, rows_a_document
from stages.gradients.taps import Call
from stages.model.batch import TokenBatch


class GradientNorms(TappedPass):
    """A context that gives the gradient norm of each document of a batch with one document a row.

    Args:
        model: evaluated as it is (call `eval()` first); parameters with `requires_grad` count.
        autocast: dtype of the forward pass; None computes in the weights' own.

    Raises `ModelError` where no linear layer trains, and in `of` where one is called twice a pass or sees other rows
    than the batch's: a sum of norms would not be the norm of the sum.
    """

    def __init__(self, model: nn.Module, *, autocast: torch.dtype | None = None) -> None:
        self._owners = decoder_linears(model)
        self.parameters = sorted(name for own in self._owners.values() for name in own.values())
        """Names of the parameters whose gradients count."""
        super().__init__(model, self._owners, autocast=autocast)

    def of(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return norm_D (of the summed answer loss, float64), loss_sum_D and answer_tokens_D; one pass each way."""
        loss_sum_D, answer_tokens_D = self._pass(batch)
        return self._squares_D.clamp_min(0).sqrt(), loss_sum_D, answer_tokens_D

    def _begin(self, batch: TokenBatch) -> None:
        assert not batch.packed, "norms need one document a row"
        self._shape = batch.shape
        device = batch.input_ids_BT.device
        self._squares_D = torch.zeros(len(batch.example_ids), dtype=torch.float64, device=device)
        self._seen: set[str] = set()

    def _visit(self, call: Call) -> None:
        own = self._owners[call.module]
        given_DTi, gradient_DTo = rows_a_document(call, self._shape, next(iter(own.values())))
        if self._seen & set(own.values()):
            raise ModelError(
                "a trainable linear layer is called once a pass",
                f"{next(iter(own.values()))} is called twice",
                "freeze it, or score with a method that reads no gradients",
            )
        self._seen.update(own.values())
        if "bias" in own:
            self._squares_D += gradient_DTo.double().sum(dim=1).square().sum(dim=1)
        if "weight" in own:
            self._squares_D += squared_norms(given_DTi, gradient_DTo)


def squared_norms(given_DTi: Tensor, gradient_DTo: Tensor) -> Tensor:
    """Return ‖Σ_t b_t a_tᵀ‖² of each document, float64; padding has no gradient and so adds nothing."""
    length, inputs, outputs = given_DTi.shape[1], given_DTi.shape[2], gradient_DTo.shape[2]
    gram = length * (inputs + outputs) < inputs * outputs
    held = length * length if gram else inputs * outputs
    most = max(1, FORMED_BYTES // (4 * held))
    found = []
    for a_dTi, b_dTo in zip(given_DTi.split(most), gradient_DTo.split(most), strict=True):
        if gram:
            squares = torch.bmm(a_dTi, a_dTi.mT).double().mul_(torch.bmm(b_dTo, b_dTo.mT))
        else:
            squares = torch.bmm(b_dTo.mT, a_dTi).double().square_()
        found.append(squares.sum(dim=(1, 2)))
    return torch.cat(found)
