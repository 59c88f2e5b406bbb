"""Loss: rows whose answer the model finds unlikely, by the loss that scoring noted.

A model that fits its data well gives a wrong answer a high loss; a weak one gives a hard task a high loss. Free: most
scorers note it. Source: the small-loss criterion of learning with noisy labels (Arpit et al. 2017, section 3).
"""

from __future__ import annotations

import numpy as np

from stages.select.noise import Evidence, NoiseFilter


class Loss(NoiseFilter):
    """Mean loss of an answer token, nats."""

    needs_scores = True

    def suspicion(self, evidence: Evidence) -> np.ndarray:
        """Return the losses. Raises `ConfigError` where scoring noted none."""
        if evidence.loss_N is None or not np.isfinite(evidence.loss_N).any():
            raise self.lacking("a loss of each row", "use a scorer that notes losses, such as `influence`")
        return evidence.loss_N
