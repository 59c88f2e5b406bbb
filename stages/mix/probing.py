"""How long and how fast adapters are trained where a mixture is tried out: the settings shared by such methods."""

from __future__ import annotations

from pydantic import Field

from data_contracts.cost import Frozen


class Probing(Frozen):
    """One short training of low-rank adapters from the model as it stands, at a constant rate after a short warm-up.

    Interpolation between such adapters holds while they are near the model: few steps, a small rate.
    """

    steps: int = Field(50, ge=1, description="Optimizer steps; OP-Mix takes 2,500 for models of billions.")
    window: int = Field(8, ge=1, description="Rows a step.")
    learning_rate: float = Field(2e-4, gt=0)
    r: int = Field(16, ge=1, description="Rank of an adapter. OP-Mix, section 4.")
    alpha: float = Field(32.0, gt=0, description="The update is scaled by alpha / r.")
