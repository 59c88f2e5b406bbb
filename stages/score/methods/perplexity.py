"""Perplexity: how surprising an example's answer is to the model, in one forward pass.

Scores are mean cross-entropies, the logarithm of perplexity: the same ranking without overflow. Which end is better
depends on the budget (`order`): hard examples help large budgets, easy or middling ones small budgets.
Source: "Compute-Constrained Data Selection" (Yin & Rush 2024): Top-, Mid- and Low-PPL.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from stages.score.scorer import Block, Given, Scorer


class Perplexity(Scorer):
    """Mean cross-entropy (nats) of the answer tokens given what stands before them."""

    reads = frozenset({"tokens", "model"})
    supported = True
    passes = "forward"

    order: Literal["top", "middle", "low"] = Field(
        "top", description="Which examples are best: the most surprising, those around the median, or the least."
    )

    def prepare(self, given: Given) -> tuple[Any, Any]:
        """Return the model and the dtype it computes in."""
        assert given.trained is not None
        return given.trained.model, given.autocast

    def score(self, block: Block, state: tuple[Any, Any]) -> np.ndarray:
        """Return score_B: the mean loss, negated for `low`; NaN where nothing is predicted."""
        import torch

        from stages.model.loss import document_losses

        model, autocast = state
        device = block.tokens.input_ids_BT.device.type
        with torch.no_grad(), torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            block.note_losses(*document_losses(model, block.tokens))
        return -block.mean_loss if self.order == "low" else block.mean_loss

    def finish(self, score_N: np.ndarray) -> np.ndarray:
        """For `middle`, return 0.5 minus the distance of each row's rank from the middle, as a share of the pool."""
        if self.order != "middle":
            return score_N
        valid = np.flatnonzero(np.isfinite(score_N))
        rank = np.empty(len(valid))
        rank[np.argsort(score_N[valid], kind="stable")] = (np.arange(len(valid)) + 0.5) / max(1, len(valid))
        result = np.full(len(score_N), np.nan, dtype=np.float32)
        result[valid] = 0.5 - np.abs(rank - 0.5)
        return result
