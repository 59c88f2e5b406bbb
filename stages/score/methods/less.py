"""LESS: the cosine between what Adam would do on an example and the target's gradient, summed over checkpoints.

For each checkpoint, Γᵢ = m' / √(v' + ε) with m' = β₁ m + (1 − β₁) gᵢ and v' = β₂ v + (1 − β₂) gᵢ² (no bias
correction), gᵢ the gradient of the example's mean answer-token loss; the target's gradients are as they are. Both go
through one random projection and are brought to length 1; the score for a group is the mean product with its rows,
weighted over checkpoints by their learning rates. Source: Xia et al. 2024 (LESS, section 3), whose dense Rademacher
matrix is a sparse sketch of the same size and variance here. They take one group a subtask and the largest product:
`score.groups: source`, `score.combine: max`. Every checkpoint's model is in memory at once. `influence` costs less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from data_contracts.errors import ArtifactError
from stages.gradients.quantised import Quantiser
from stages.meter.products import product_flops
from stages.score.features import FeatureScorer
from stages.score.scorer import Block, Given
from stages.score.target import checkpoint_weights, target_mean

if TYPE_CHECKING:
    from torch import Tensor

    from stages.gradients.examples import ExampleGradients
    from stages.gradients.sketch import SparseSketch
    from stages.model.batch import TokenBatch
    from stages.model.checkpoint import TrainedModel


class Less(FeatureScorer):
    """Cosine of projected Adam updates with projected target gradients, in [-1, 1]."""

    reads = frozenset({"tokens", "model", "moments", "checkpoints"})
    passes = "train"
    grouped = True

    dimensions: int = Field(8192, ge=2, le=2**20, multiple_of=2, description="Of the projection. LESS, section 3.2.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Weight of the checkpoint's first moment in Γ.")

    def prepare(self, given: Given) -> tuple[list[Checkpoint], np.ndarray]:
        """Open every checkpoint and return them with the groups' features, (J, checkpoints · dimensions).

        Raises `InputError` where there is no target, `ArtifactError` where a checkpoint has no moments.
        """
        from stages.gradients.examples import ExampleGradients
        from stages.gradients.sketch import SparseSketch

        sketch, opened = SparseSketch(self.dimensions, seed=given.seed), []
        for trained, weight in zip(given.checkpoints, checkpoint_weights(given), strict=True):
            gradients = given.resources.enter_context(ExampleGradients(trained.model, autocast=given.autocast))
            missing = sorted(set(gradients.parameters) - set(trained.moments))
            if missing:
                raise ArtifactError(
                    "a checkpoint with Adam moments of every trainable parameter",
                    f"{missing[0]} has none",
                    "score with `influence`, which can do without, or after a warm-up",
                )
            opened.append(Checkpoint(gradients, sketch, trained, weight, self.beta1))

        def features(batch: TokenBatch) -> np.ndarray:
            for _ in opened:
                given.meter.train(batch)
            given.meter.add(sum(one.sketch.flops(one.gradients.size) for one in opened) * len(batch.example_ids))
            return _joined(opened, batch, adam=False)[0]

        return opened, target_mean(given, features).astype(np.float32)

    def score(self, block: Block, state: tuple[list[Checkpoint], np.ndarray]) -> np.ndarray:
        """Return score_BJ; NaN where nothing is predicted."""
        opened, target_JK = state
        feature_BK, loss_sum_B, answer_tokens_B = _joined(opened, block.tokens, adam=True)
        for _ in opened[1:]:  # the engine counts one
            block.meter.train(block.tokens)
        block.meter.add(sum(one.sketch.flops(one.gradients.size) for one in opened) * len(block.example_ids))
        block.note_losses(loss_sum_B, answer_tokens_B)
        if self.store_bits:
            block.note_features(Quantiser(feature_BK.shape[1], self.store_bits), feature_BK)
        block.meter.add(product_flops(feature_BK, target_JK.T))
        return feature_BK @ target_JK.T


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, opened: gives unit features of a batch, Adam's updates or plain gradients."""

    gradients: ExampleGradients
    sketch: SparseSketch
    trained: TrainedModel
    weight: float
    beta1: float

    def unit(self, batch: TokenBatch, *, adam: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return unit_DK (NaN where nothing is predicted), loss_sum_D and answer_tokens_D."""
        import torch

        from stages.gradients.sketch import sketched

        tokens_D = torch.bincount(batch.answers.document_N, minlength=len(batch.example_ids))

        def change(name: str, some: slice, gradient_dP: Tensor) -> Tensor:
            mean_dP = gradient_dP / tokens_D[some, None].clamp_min(1)
            return self._update(name, mean_dP) if adam else mean_dP

        found_DK, loss_sum_D, answer_tokens_D = sketched(self.gradients, self.sketch, batch, change)
        found_DK = found_DK / torch.linalg.vector_norm(found_DK, dim=1, keepdim=True)
        return found_DK.masked_fill(tokens_D[:, None] == 0, float("nan")), loss_sum_D, answer_tokens_D

    def _update(self, name: str, gradient_dP: Tensor) -> Tensor:
        """Return Γ."""
        first, second = (moment.to(gradient_dP).flatten() for moment in self.trained.moments[name])
        beta1, beta2 = self.beta1, float(self.trained.trainer["beta2"])
        raised = (beta2 * second + (1 - beta2) * gradient_dP.square()).add_(float(self.trained.trainer["epsilon"]))
        return (beta1 * first + (1 - beta1) * gradient_dP) / raised.sqrt_()


def _joined(opened: list[Checkpoint], batch: TokenBatch, *, adam: bool) -> tuple[np.ndarray, Tensor, Tensor]:
    """Return the checkpoints' unit features side by side, each times the root of its weight; the last one's losses."""
    parts = []
    for one in opened:
        unit_DK, loss_sum_D, answer_tokens_D = one.unit(batch, adam=adam)
        parts.append(np.asarray(unit_DK.float().cpu()) * np.float32(one.weight**0.5))
    return np.concatenate(parts, axis=1), loss_sum_D, answer_tokens_D
