"""Length: how many tokens an example has, the baseline that shows whether another scorer is more than length.

Long answers alone are a strong selection for instruction tuning (Zhao et al. 2024, "Long Is More for Alignment").
Reads nothing but the lengths that every table of tokens holds: no model is loaded.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from stages.score.scorer import Block, Scorer


class Length(Scorer):
    """Number of tokens of the answer, or of the whole example; negated for `shortest`."""

    of: Literal["answer", "example"] = Field("answer", description="Supervised tokens, or all of them.")
    order: Literal["longest", "shortest"] = Field("longest", description="Which examples are best.")

    def score(self, block: Block, state: None) -> np.ndarray:
        """Return score_B; exact up to 2²⁴ tokens, which float32 holds."""
        lengths_B = block.answer_lengths_B if self.of == "answer" else block.lengths_B
        return lengths_B * np.float32(-1 if self.order == "shortest" else 1)
