"""RHO-loss: what is left to learn of an example, the model's loss less that of a reference which has learned it.

The reference is a checkpoint of the same base that was trained on what is wanted (the target, or rows held out of the
pool); it is given as the input `reference`. A row that is noise is hard for both, a row that is learned easy for both:
neither scores. Two forward passes. Source: Mindermann et al. 2022, eq. 3, over the answer's tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stages.score.scorer import Block, Given, Scorer


class RhoLoss(Scorer):
    """Mean loss (nats a token) of the answer by the model, less that by the reference."""

    reads = frozenset({"tokens", "model", "reference"})
    passes = "forward"

    def prepare(self, given: Given) -> tuple[Any, Any, Any]:
        """Return the model, the reference, and the dtype they compute in."""
        assert given.trained is not None
        assert given.reference is not None
        return given.trained.model, given.reference.model, given.autocast

    def score(self, block: Block, state: tuple[Any, Any, Any]) -> np.ndarray:
        """Return score_B; NaN where nothing is predicted."""
        import torch

        from stages.model.loss import document_losses

        model, reference, autocast = state
        batch = block.tokens
        block.meter.forward(batch)  # the engine counts one
        device = batch.input_ids_BT.device.type
        with torch.no_grad(), torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            block.note_losses(*document_losses(model, batch))
            learned_B, tokens_B = document_losses(reference, batch)
        return block.mean_loss - np.asarray((learned_B.double() / tokens_B).cpu())
