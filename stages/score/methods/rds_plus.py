"""RDS+: how near an example lies to its nearest target row, by position-weighted last hidden states.

Under causal attention late tokens have seen more, so position t weighs t / Σt. The cosine with each row of a target
group, of which the largest counts (or their mean). One forward pass without the output head. Source: Ivison et al. 2025
("Large-Scale Data Selection for Instruction Tuning"), who take rows for each target row in turn; a round over groups is
the selector's here, with `score.groups: source`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from stages.meter.products import product_flops
from stages.score.pooled import pooled, pooled_target
from stages.score.scorer import Block, Given, Scorer


class RDSPlus(Scorer):
    """Largest (or mean) cosine with the rows of each target group, in [-1, 1]."""

    reads = frozenset({"tokens", "model"})
    passes = "decoder"
    grouped = True

    over: Literal["max", "mean"] = Field(
        "max", description="Which cosine counts: that of the nearest row, or the mean."
    )

    def prepare(self, given: Given) -> tuple[Any, Any, Any]:
        """Return the model, its dtype and each group's vectors. Raises `InputError` where there is no target."""
        assert given.trained is not None
        return given.trained.model, given.autocast, pooled_target(given, "position")

    def score(self, block: Block, state: tuple[Any, Any, Any]) -> np.ndarray:
        """Return score_BJ."""
        model, autocast, groups = state
        unit_DH = pooled(model, block.tokens, "position", autocast)
        block.meter.add(sum(product_flops(unit_DH, unit_RH.T) for unit_RH in groups))
        columns = [unit_DH @ unit_RH.T for unit_RH in groups]
        return np.stack(
            [np.asarray((c.amax(dim=1) if self.over == "max" else c.mean(dim=1)).cpu()) for c in columns], axis=1
        )
