"""One forward and backward pass that shows what its layers saw: the common part of all that reads gradients of a batch.

A subclass names the modules to tap and computes in `_visit`; the loss is the sum of the documents' summed answer
losses. Which linear layers stand for the whole model is said here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from data_contracts.errors import ModelError
from stages.gradients.taps import Call, Taps, owners
from stages.model.batch import TokenBatch
from stages.model.loss import document_losses, logit_chunk, plain

FORMED_BYTES = 64 * 2**20
"""Memory that the per-document gradients of one layer may take at once."""


class TappedPass:
    """A context in which passes over batches show every call of some modules to `_visit`; no weight gradient is formed.

    Args:
        model: evaluated as it is (call `eval()` first: dropout would make what is found random).
        modules: those to tap.
        autocast: dtype of the forward pass; None computes in the weights' own.
        beside: another one that is shown the same passes; what it found stands in it after each. Only this one is
            entered.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Iterable[nn.Module],
        *,
        autocast: torch.dtype | None = None,
        beside: TappedPass | None = None,
    ) -> None:
        self._model, self._autocast, self.beside = model, autocast, beside
        self._tapped = set(modules)
        self._taps = Taps(model, self._tapped | (beside._tapped if beside else set()), self._show)

    def __enter__(self) -> Self:
        self._taps.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._taps.__exit__(kind, error, trace)

    def _begin(self, batch: TokenBatch) -> None:
        """Make ready for a pass over `batch`."""
        raise NotImplementedError

    def _visit(self, call: Call) -> None:
        """See one call of a tapped module."""
        raise NotImplementedError

    def _show(self, call: Call) -> None:
        if call.module in self._tapped:
            self._visit(call)
        if self.beside is not None:
            self.beside._show(call)

    def _pass(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Run both ways and return loss_sum_D (detached) and answer_tokens_D."""
        self._begin(batch)
        if self.beside is not None:
            self.beside._begin(batch)
        self._taps.begin(batch.shape[0])
        device = batch.input_ids_BT.device.type
        with torch.enable_grad():
            with torch.autocast(device, dtype=self._autocast, enabled=self._autocast is not None):
                loss_sum_D, answer_tokens_D = document_losses(self._model, batch, chunk_tokens=logit_chunk(self._model))
            if loss_sum_D.requires_grad and len(batch.answers.label_N):
                loss_sum_D.sum().backward()
        return loss_sum_D.detach(), answer_tokens_D


def decoder_linears(model: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Return the decoder's trainable linear layers with their attributes' and parameters' names (see `taps.owners`).

    Adapters are among them; the output head and a weight that another kind of module shares are not. Raises
    `ModelError` where there is none.
    """
    head = plain(model).get_output_embeddings()
    found = owners(model, [name for name, value in model.named_parameters() if value.requires_grad])
    linear = {m: own for m, own in found.items() if type(m).forward in (nn.Linear.forward, Conv1D.forward)}
    shared = {name for m, own in found.items() if m is head or m not in linear for name in own.values()}
    kept = {m: own for m, own in linear.items() if m is not head and not shared & set(own.values())}
    if not kept:
        raise ModelError(
            "a trainable linear layer besides the output head",
            f"{type(plain(model)).__name__} has none",
            "score with a technique that trains one, or with `el2n`, which reads no gradients",
        )
    return kept


def rows_a_document(call: Call, shape: tuple[int, int], name: str) -> tuple[Tensor, Tensor]:
    """Return what a linear layer was given and its output gradient as (D, T, i) and (D, T, o), one document a row.

    Raises `ModelError` where the layer sees other rows than the tokens of a batch of `shape` (D, T).
    """
    if call.gradient.shape[:-1].numel() != shape[0] * shape[1]:
        raise ModelError(
            "a trainable linear layer sees one row a token",
            f"{name} sees rows of shape {tuple(call.gradient.shape[:-1])} in a batch of {shape[0]} x {shape[1]}",
            "freeze it, or score with a method that reads no gradients",
        )
    gradient_DTo = call.gradient.reshape(*shape, -1)
    return call.given.reshape(*shape, -1).to(gradient_DTo.dtype), gradient_DTo
