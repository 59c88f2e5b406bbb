"""Instruction-following difficulty: how much the prompt helps the model with the answer.

The answer's mean loss given the prompt, beside that of the answer alone. Both are over the same tokens: without the
prompt nothing predicts the first answer token, unless the tokenizer begins texts with a token of its own, which then
stands before the answer too. Of several turns the answers follow one another. Two methods make a ratio of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from stages.score.scorer import Block, Given, Scorer

if TYPE_CHECKING:
    from stages.model.batch import TokenBatch


@dataclass(frozen=True)
class Beginning:
    """The model, the dtype it computes in, and the token that every text begins with, if there is one."""

    model: Any
    autocast: Any
    first: int | None


class InstructionFollowing(Scorer):
    """A ratio of the answer's losses with and without its prompt; subclasses say which."""

    reads = frozenset({"tokens", "model"})
    passes = "forward"
    of_perplexities: ClassVar[bool]

    above_one: Literal["last", "keep"] = Field(
        "last",
        description="Where the prompt hurts (ratio above 1): rank behind all others, the farther above the lower "
        "(the score is 1 - ratio), as the papers drop such rows; or keep the ratio.",
    )

    def prepare(self, given: Given) -> Beginning:
        """Return the model and what texts begin with."""
        from stages.model.loss import plain

        assert given.trained is not None
        first = plain(given.trained.model).config.bos_token_id
        return Beginning(given.trained.model, given.autocast, first if isinstance(first, int) else None)

    def score(self, block: Block, state: Beginning) -> np.ndarray:
        """Return score_B; NaN where fewer than one token is predicted both ways (an example without a prompt: 1)."""
        import torch

        from stages.model.loss import token_losses

        batch = block.tokens
        alone = answers_alone(batch, state.first)
        block.meter.forward(alone)
        device, count = batch.input_ids_BT.device, len(block.example_ids)
        with torch.no_grad(), torch.autocast(device.type, dtype=state.autocast, enabled=state.autocast is not None):
            given_N = token_losses(state.model, batch).double()
            alone_M = token_losses(state.model, alone).double()
        counts_B = torch.bincount(batch.answers.document_N, minlength=count)
        block.note_losses(_sums(given_N, batch.answers.document_N, count), counts_B)
        # what is predicted both ways is the end of each answer: leave out what stands before it
        both_B = torch.minimum(counts_B, torch.bincount(alone.answers.document_N, minlength=count))
        means = [
            _sums(*_last(loss, found.document_N, both_B), count) / both_B
            for loss, found in ((given_N, batch.answers), (alone_M, alone.answers))
        ]
        ratio_B = (means[0] - means[1]).exp() if self.of_perplexities else means[0] / means[1]
        if self.above_one == "last":
            ratio_B = torch.where(ratio_B > 1, 1 - ratio_B, ratio_B)
        return np.asarray(ratio_B.cpu())


def answers_alone(batch: TokenBatch, first: int | None) -> TokenBatch:
    """Return the batch with the supervised tokens of each document alone, after `first` where the document has it."""
    from stages.model.batch import Row, collate

    rows = []
    for index, example_id in enumerate(batch.example_ids):
        real = batch.attention_BT[index]
        ids_T, answer_T = batch.input_ids_BT[index][real].cpu().numpy(), batch.answer_BT[index][real].cpu().numpy()
        kept_T = answer_T.copy()
        if not answer_T[0] and first is not None and ids_T[0] == first:
            kept_T[0] = True
        if not kept_T.any():
            kept_T[0] = True  # a row needs a token; it predicts none
        rows.append(Row(example_id, ids_T[kept_T], answer_T[kept_T]))
    return collate(rows).to(batch.input_ids_BT.device)


def _sums(value_N: Any, document_N: Any, count: int) -> Any:
    return value_N.new_zeros(count).index_add_(0, document_N, value_N)


def _last(value_N: Any, document_N: Any, keep_B: Any) -> tuple[Any, Any]:
    """Return the last `keep_B` values of each document, and their documents."""
    import torch

    counts_B = torch.bincount(document_N, minlength=len(keep_B))
    ends_B = counts_B.cumsum(0)
    place_N = torch.arange(len(value_N), device=value_N.device)
    kept_N = place_N >= (ends_B - keep_B)[document_N]
    return value_N[kept_N], document_N[kept_N]
