"""The family of techniques: which of a model's parameters train, and how the trained model becomes one model again.

A technique changes a model in place of its parameters only: after `wrap` what trains has `requires_grad`, and nothing
else has. The optimizer step is the same for all (see `step.py`); loading and saving belong to the noun *model*. This
module imports no torch, so that a stage's declaration can name the family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from data_contracts.method import Method

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class Technique(Method):
    """One way of training a model."""

    family: ClassVar[str] = "techniques"
    home: ClassVar[str] = "stages.technique.methods"
    learning_rate: ClassVar[float]
    """Peak learning rate of AdamW where the configuration gives none."""

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return `model` ready to train: exactly the parameters that train have `requires_grad`.

        Random initial values come from torch's generator: seed it before, alike on every worker.
        """
        raise TypeError(f"{type(self).__name__} defines no wrap")

    def merge(self, model: nn.Module) -> PreTrainedModel:
        """Return one plain model that computes what the trained `model` computes; `model` is used up."""
        raise TypeError(f"{type(self).__name__} defines no merge")

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return how many numbers would train. `model` may stand on the meta device; it is not changed."""
        raise TypeError(f"{type(self).__name__} defines no trainable_count")
