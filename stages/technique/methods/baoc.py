"""BAOC: all weights train by AdamW, and each block's moments have the form that risks least within a budget of bytes.

Moments of a block are float32 (8 bytes a parameter), one second moment a head or row (4), 8 bits (2.03) or 4 bits
(1.06). What a form risks is read off the first updates' gradients, block by block, and all are assigned at once and
exactly. The plan counts the whole budget as taken, and the dearest update that it permits. The forms' time is not
weighed: as modelled it differs little.
Source of the problem: BAOC (arXiv 2605.04711), of which the abstract alone was at hand; `stages.technique.mixed_states`
says what the risk is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from data_contracts.config import Saving
from stages.technique.base import InPlace

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from data_contracts.config import TrainConfig
    from stages.technique.optimizer import Optimizer
    from stages.technique.step import States


class Baoc(InPlace):
    """Train every parameter, moments in forms assigned by risk. The default peak learning rate is that of `full`."""

    learning_rate: ClassVar[float] = 2e-5
    steady: ClassVar[bool] = False
    savings: ClassVar[frozenset[Saving]] = frozenset({"recompute", "chunked_loss"})

    state_share: float = Field(0.3, gt=0, le=1, description="Of float32 moments' bytes that may be held.")
    probe_steps: int = Field(4, ge=1, le=64, description="Updates whose gradients are sampled, in the cheapest form.")

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model itself with every parameter marked as trained."""
        from stages.technique.states import code_values, has_8bit

        if has_8bit():
            code_values()  # made of real numbers, where the optimizer may be built of fake ones
        return super().wrap(model)

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return AdamW with forms of moments assigned by risk."""
        from stages.technique.mixed_states import RiskAdam

        return RiskAdam(model, train, learning_rate, share=self.state_share, probe=self.probe_steps)

    def update_bytes(self, model: PreTrainedModel, device: str) -> int:
        """Return what the dearest update holds of all that the budget permits."""
        from data_contracts.config import TrainConfig
        from stages.technique.mixed_states import RiskAdam

        settings: dict[str, Any] = {"share": self.state_share, "probe": self.probe_steps}
        return RiskAdam(self.wrap(model), TrainConfig(), self.learning_rate, **settings).update_bytes(device)

    def moment_bytes(self, model: PreTrainedModel) -> int:
        """Return the budget of bytes."""
        from stages.technique.mixed_states import budget_of

        return budget_of(model, self.state_share)
