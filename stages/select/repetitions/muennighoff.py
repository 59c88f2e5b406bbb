"""Muennighoff's effective data: repeated tokens decay exponentially in worth, from fresh to nothing.

Source: Muennighoff et al. 2023 (arXiv 2305.16264), equation 5; the law stands in stages/governor/laws/muennighoff.py.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stages.governor.laws.muennighoff import DATA_DECAY, effective
from stages.select.repetition import PrefixLaw


class MuennighoffData(PrefixLaw):
    """D' = U + U R* (1 − exp(−R/R*)) of U unique tokens seen 1 + R times."""

    decay: float = Field(
        DATA_DECAY,
        gt=0,
        description="R*: repetitions after which a token's worth is 1/e; fitted with weight decay 0.1.",
    )

    def effective_tokens(self, unique_K: np.ndarray, epochs_K: np.ndarray) -> np.ndarray:
        """Return D' of each."""
        return effective(unique_K, np.maximum(epochs_K - 1.0, 0.0), self.decay)
