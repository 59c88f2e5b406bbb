"""Self-influence: rows whose own gradient is long for the tokens they answer with.

The length of the stored feature is that of the gradient of the row's summed answer loss (`influence` with `store_bits`;
features of `less` are all of length one and say nothing), divided by the answer's tokens. Long means that a step on the
row moves the model mostly for the row itself. Source: Pruthi et al. 2020 (TracIn, section 4: mislabelled examples).
"""

from __future__ import annotations

import numpy as np

from stages.select.noise import Evidence, NoiseFilter


class SelfInfluence(NoiseFilter):
    """‖feature‖ / answer tokens."""

    needs_scores = True

    def suspicion(self, evidence: Evidence) -> np.ndarray:
        """Return suspicion_N; NaN for a row without a feature. Raises `ConfigError` without features of own lengths."""
        if evidence.features is None:
            raise self.lacking("features", "set `store_bits: 8` in `score.scorer` of `influence`")
        length_F = np.concatenate([np.linalg.norm(part_bK, axis=1) for part_bK in evidence.features.parts()])
        if len(length_F) > 1 and np.allclose(length_F, length_F.mean(), rtol=0.05):
            raise self.lacking("features that keep their length", "store those of `influence`: others are normed")
        answer_N = evidence.tokens.column("n_answer_tokens").to_numpy()
        found_N = np.full(len(answer_N), np.nan)
        rows_F = evidence.features.rows_F
        found_N[rows_F] = length_F / np.maximum(answer_N[rows_F], 1)
        return found_N
