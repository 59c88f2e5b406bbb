"""Embedding: how near an example lies to the target, by the model's own mean-pooled last hidden states.

The cosine of an example's vector with the mean of the target group's unit vectors: the mean cosine with its rows, up to
a factor. One forward pass without the output head. Similar is not the same as useful: it finds what looks like the
target, cheaply. Source: the embedding baseline of Yin & Rush 2024 and of Xia et al. 2024, with the model being trained
in place of a separate encoder.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stages.meter.products import product_flops
from stages.score.pooled import pooled, pooled_target
from stages.score.scorer import Block, Given, Scorer


class Embedding(Scorer):
    """Cosine to the mean of each target group, in [-1, 1]."""

    reads = frozenset({"tokens", "model"})
    supported = True
    passes = "decoder"
    grouped = True

    def prepare(self, given: Given) -> tuple[Any, Any, Any]:
        """Return the model, its dtype and the groups' unit means. Raises `InputError` where there is no target."""
        import torch

        assert given.trained is not None
        means = [unit_RH.mean(dim=0) for unit_RH in pooled_target(given, "even")]
        return given.trained.model, given.autocast, torch.nn.functional.normalize(torch.stack(means), dim=1)

    def score(self, block: Block, state: tuple[Any, Any, Any]) -> np.ndarray:
        """Return score_BJ."""
        model, autocast, mean_JH = state
        unit_DH = pooled(model, block.tokens, "even", autocast)
        block.meter.add(product_flops(unit_DH, mean_JH.T))
        return np.asarray((unit_DH @ mean_JH.T).cpu())
