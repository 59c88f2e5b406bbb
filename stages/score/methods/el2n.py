"""EL2N: how far the predicted distribution of each answer token is from the token that stands there.

A token's error is ‖p − e_y‖₂ with p the model's distribution and e_y the token's one-hot; an example's score is the
mean over its answer tokens. Σ_v p_v² − 2 p_y + 1 needs no one-hot, and logits pass in chunks, so that (tokens x
vocabulary) is never held whole. Source: Paul, Ganguli & Dziugaite 2021 ("Deep Learning on a Data Diet"), for classes;
theirs is a mean over models early in training, this one is of the one checkpoint. High scores hold mislabelled rows
too, and small budgets want easy ones (Sorscher et al. 2022): hence `order`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from stages.score.scorer import Block, Given, Scorer

if TYPE_CHECKING:
    from torch import Tensor


class EL2N(Scorer):
    """Mean over answer tokens of ‖softmax − one-hot‖₂, in [0, √2]; negated for `easy`."""

    reads = frozenset({"tokens", "model"})
    passes = "forward"

    order: Literal["hard", "easy"] = Field("hard", description="Which examples are best: large errors, or small ones.")

    def prepare(self, given: Given) -> tuple[Any, Any]:
        """Return the model and the dtype it computes in."""
        assert given.trained is not None
        return given.trained.model, given.autocast

    def score(self, block: Block, state: tuple[Any, Any]) -> np.ndarray:
        """Return score_B; NaN where nothing is predicted."""
        import torch

        from stages.model.loss import hidden_states, logit_chunk, plain

        model, autocast = state
        batch = block.tokens
        found, device = batch.answers, batch.input_ids_BT.device
        chunk = logit_chunk(model)
        # loss and error of each answer token, and 1 to count it, summed by example
        sums_B3 = torch.zeros(len(block.example_ids), 3, dtype=torch.float64, device=device)
        with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            hidden_NH = hidden_states(model, batch).flatten(0, 1).index_select(0, found.source_N)
            for start in range(0, len(found.label_N), chunk):
                piece = slice(start, start + chunk)
                loss_n, error_n = _token_errors(plain(model), hidden_NH[piece], found.label_N[piece])
                sums_B3.index_add_(0, found.document_N[piece], torch.stack([loss_n, error_n, loss_n * 0 + 1], dim=1))
        block.note_losses(sums_B3[:, 0], sums_B3[:, 2])
        score_B = sums_B3[:, 1] / sums_B3[:, 2]  # 0 / 0 is NaN: nothing is predicted
        return np.asarray((-score_B if self.order == "easy" else score_B).cpu())


def _token_errors(model: Any, hidden_nH: Tensor, label_n: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's cross-entropy and ‖p − e_y‖₂, float64."""
    from stages.model.loss import logits_of

    logits_nV = logits_of(model, hidden_nH)
    logs_nV = (logits_nV if logits_nV.element_size() == 8 else logits_nV.float()).log_softmax(dim=1)
    chosen_n = logs_nV.gather(1, label_n[:, None])[:, 0].double()
    squares_n = logs_nV.mul_(2).exp_().sum(dim=1).double()  # p², in place
    return -chosen_n, (squares_n - 2 * chosen_n.exp() + 1).clamp_min(0).sqrt()
