"""Cross-entropy by document: the one loss that training, scoring and evaluation share.

Only the positions that predict an answer token go through the output head, in chunks where asked, so that the
(tokens x vocabulary) logits are never held whole. Returns sums and counts, never a mean: what a loss is divided by is
the caller's decision. Shapes: N answer tokens, D documents, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from data_contracts.errors import ModelError
from stages.model.batch import TokenBatch
from stages.model.packing import attention_mask_for
from stages.model.shards import WITHIN

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_BYTES = 512 * 2**20
"""Memory of the logits that may be held at once; a batch with more goes through the head in chunks."""


def logit_chunk(model: nn.Module) -> int:
    """Return for how many answer tokens the float32 logits are held at once: as many as `LOGIT_BYTES` has room for."""
    inner = plain(model)
    vocabulary = getattr(inner.get_output_embeddings(), "out_features", None) or inner.config.vocab_size
    return max(1, LOGIT_BYTES // (4 * vocabulary))


def chunk_of(batch: TokenBatch, chunks: int) -> int | None:
    """Return the answer tokens of one of `chunks` parts of `batch`; None for one part."""
    return max(1, math.ceil(len(batch.answers.label_N) / chunks)) if chunks > 1 else None


def document_losses(model: nn.Module, batch: TokenBatch, *, chunk_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (loss_sum_D, answer_tokens_D) of one batch.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        batch: on the model's device.
        chunk_tokens: answer tokens that go through the head at once; the backward pass computes them again (one more
            head forward). None keeps all logits.

    Returns:
        loss_sum_D: sum of cross-entropy (nats) over the document's answer tokens; differentiable, float32 (float64 for
            a float64 model).
        answer_tokens_D: int64, how many tokens that is; the first token of a document never counts.
    """
    within = getattr(model, WITHIN, None)  # gathers what lies outside the blocks around the pass
    return (
        _document_losses(model, batch, chunk_tokens)
        if within is None
        else within(_document_losses, model, batch, chunk_tokens)
    )


def _document_losses(model: nn.Module, batch: TokenBatch, chunk_tokens: int | None) -> tuple[Tensor, Tensor]:
    loss_N = token_losses(model, batch, chunk_tokens=chunk_tokens)
    documents = len(batch.example_ids)
    owner_N = batch.answers.document_N
    sums_D = torch.zeros(documents, dtype=loss_N.dtype, device=loss_N.device).index_add(0, owner_N, loss_N)
    counts_D = torch.zeros(documents, dtype=torch.int64, device=owner_N.device)
    return sums_D, counts_D.index_add(0, owner_N, torch.ones_like(owner_N))


def token_losses(model: nn.Module, batch: TokenBatch, *, chunk_tokens: int | None = None) -> Tensor:
    """Return loss_N, one cross-entropy an answer token in the order of `batch.answers`."""
    found = batch.answers
    hidden_NH = hidden_states(model, batch).flatten(0, 1).index_select(0, found.source_N)
    inner = plain(model)
    if chunk_tokens is None or len(found.label_N) <= chunk_tokens:
        return _cross_entropy(inner, hidden_NH, found.label_N)
    parts = []
    for start in range(0, len(found.label_N), chunk_tokens):
        piece = slice(start, start + chunk_tokens)
        args = (inner, hidden_NH[piece], found.label_N[piece])
        if torch.is_grad_enabled():
            parts.append(checkpoint(_cross_entropy, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_cross_entropy(*args))
    return torch.cat(parts)


def _cross_entropy(model: PreTrainedModel, hidden_NH: Tensor, label_N: Tensor) -> Tensor:
    logits_NV = logits_of(model, hidden_NH)
    exact = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return functional.cross_entropy(exact, label_N, reduction="none")


def plain(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a PEFT or data-parallel wrapper (adapters stay in place)."""
    if hasattr(model, "module") and not hasattr(model, "config"):
        model = model.module
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def hidden_states(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Return the decoder's last hidden states, shape (B, T, H).

    Right padding under causal attention needs no mask: no real token sees it. A packed batch gets its block-diagonal
    mask and restarted positions. Raises `ModelError` where the model cannot take such a mask.
    """
    inner = plain(model)
    asked: dict[str, Any] = {"input_ids": batch.input_ids_BT, "use_cache": False}
    if batch.packed:
        _refuse_unmaskable(inner, batch.shape[1])
        asked |= {"attention_mask": attention_mask_for(batch), "position_ids": batch.positions_BT}
    hidden_BTH: Tensor = inner.base_model(**asked).last_hidden_state
    return hidden_BTH


def _refuse_unmaskable(model: PreTrainedModel, length: int) -> None:
    window = getattr(model.config, "sliding_window", None)
    short = window is not None and window < length and getattr(model.config, "use_sliding_window", True)
    if short or model.config._attn_implementation != "sdpa":
        raise ModelError(
            "packing needs one block-diagonal attention mask for every layer",
            f"{type(model).__name__} has "
            + (f"a sliding window of {window} tokens" if short else f"{model.config._attn_implementation} attention"),
            "set `plan.packed: false`",
        )


def logits_of(model: PreTrainedModel, hidden_NH: Tensor) -> Tensor:
    """Return the head's logits for chosen hidden states, with the scale or cap that the architecture puts on them."""
    logits_NV: Tensor = model.get_output_embeddings()(hidden_NH)
    config = model.config
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits_NV = logits_NV * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits_NV = logits_NV / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma 2
        logits_NV = torch.tanh(logits_NV / cap) * cap
    return logits_NV


def verify_head(model: PreTrainedModel) -> None:
    """Check on two tokens that decoder + head give the model's own logits.

    Raises `ModelError` for an architecture that does something more between the two, whose losses would be wrong,
    and for weights that give logits that are not finite.
    """
    ids = torch.tensor([[0, 1]], device=model.device)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        ours = logits_of(model, model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not bool(whole.isfinite().all()):
        raise ModelError(
            "the model's logits are finite",
            f"those of {type(model).__name__} on two tokens are not",
            "the weights hold NaN or infinite values: fetch the model again, or go back to an earlier checkpoint",
        )
    if not torch.allclose(whole.double(), ours.double(), rtol=1e-3, atol=1e-3):
        raise ModelError(
            "a model's logits are its output head applied to its last hidden states",
            f"{type(model).__name__} does something else",
            "use a model whose head is a plain projection",
        )
