"""The family of techniques: which of a model's parameters train, and how the trained model becomes one model again.

Four verbs: `wrap` makes a model ready, `optimizer` gives what steps it, whose `step` takes a window (`train` runs it,
`plan` traces it), `merge` makes a plain model again. A technique that names no optimizer has AdamW over everything that
trains. Loading and saving belong to the noun *model*. This module imports no torch, so that a stage's declaration can
name the family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from pydantic import Field

from data_contracts.config import Saving
from data_contracts.errors import ConfigError
from data_contracts.method import Method

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from data_contracts.config import TrainConfig
    from stages.technique.optimizer import Optimizer
    from stages.technique.step import States

Order = Literal["random", "ascending", "descending"]
"""Of blocks that train one after another, in a cycle through all."""


class Technique(Method):
    """One way of training a model."""

    family: ClassVar[str] = "techniques"
    home: ClassVar[str] = "stages.technique.methods"
    learning_rate: ClassVar[float]
    """Peak learning rate where the configuration gives none."""
    steady: ClassVar[bool] = True
    """Whether the same parameters train at every window, all by backward passes and with Adam's two moments: what reads
    gradients in training (`train.influence`) needs that."""
    savings: ClassVar[frozenset[Saving]] = frozenset(get_args(Saving)) - {"shard"}
    """Which of a plan's savings go with it."""
    whole: ClassVar[bool] = True
    """Whether a micro-batch is passed forward whole before it is passed backward: a plan is then put together from
    traces of few layers, else all layers are traced."""
    packs: ClassVar[bool] = False
    """Whether `wrap` makes a model smaller: it is then wrapped in main memory and put on its device afterwards."""

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return `model` ready to train: exactly the parameters that train have `requires_grad`.

        Where they change, the optimizer says when. A model loaded from a checkpoint without adapters is wrapped again.
        Random initial values come from torch's generator: seed it before, alike on every worker.
        """
        raise TypeError(f"{type(self).__name__} defines no wrap")

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return what steps the wrapped `model`.

        Args:
            model: from `wrap`, or from a checkpoint of this technique.
            train: settings of AdamW.
            learning_rate: the peak.
            seed: of all that is drawn in training; alike on every worker.
            states: in which AdamW holds its moments; others than float32 are asked for only where `savings` has them.
        """
        from stages.technique.optimizer import Adam

        return Adam(model, train, learning_rate, states)

    @property
    def traced_layers(self) -> int:
        """Least depth at which the last layer is like all further ones: a plan is put together from traces of it."""
        return 2

    @property
    def priced_layers(self) -> tuple[int, int]:
        """Two depths on whose line the operations of a window of all greater ones lie."""
        return (1, 2)

    def traced_lengths(self, longest: int) -> tuple[int, ...]:
        """Return the row lengths, at most `longest`, whose dearest is the dearest of all."""
        return (longest,)

    def in_four_bits(self) -> Technique | None:
        """Return the same training beside frozen weights of four bits, where there is one."""
        return None

    def moment_bytes(self, model: PreTrainedModel) -> int | None:
        """Return the bytes of the moments of `model` at full depth where they are not those of its layers added up."""
        return None

    def update_bytes(self, model: PreTrainedModel, device: str) -> int | None:
        """Return what the update of `model` at full depth holds on `device`, at the most, beside weights, moments and
        gradients, where that does not follow from an update of few layers. `model` may stand on the meta device."""
        return None

    def merge(self, model: nn.Module) -> PreTrainedModel:
        """Return one plain model that computes what the trained `model` computes; `model` is used up."""
        raise TypeError(f"{type(self).__name__} defines no merge")

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return how many numbers train at once, at most. `model` may stand on the meta device; it is not changed."""
        raise TypeError(f"{type(self).__name__} defines no trainable_count")


class InPlace(Technique):
    """A technique that trains the model's own weights and adds none: all of them, unless it says otherwise."""

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model itself with every parameter marked as trained."""
        return model.requires_grad_(True)

    def merge(self, model: nn.Module) -> PreTrainedModel:
        """Return the model itself."""
        return model  # type: ignore[return-value]

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return the number of parameters, tied ones once."""
        return sum(parameter.numel() for parameter in model.parameters())


class Probing(InPlace):
    """A technique that reads slopes by forward passes alone, for which no activations are kept."""

    @property
    def traced_layers(self) -> int:
        """Without activations kept, the third layer is the first that begins with what all further ones begin with."""
        return 3


class ProbingLongRows(Probing):
    """A technique that reads long rows by forward passes alone, the others by backward passes as well."""

    long_tokens: int | None = Field(
        None, ge=1, description="Longer rows are read by forward passes alone; unset reads all rows both ways."
    )

    def traced_lengths(self, longest: int) -> tuple[int, ...]:
        """Return the longest row, and the longest that is read by a backward pass."""
        if self.long_tokens is None or longest <= self.long_tokens:
            return (longest,)
        return (self.long_tokens, longest)


class InNumbers(InPlace):
    """A technique that holds the decoder's linear layers as whole numbers of n bits, and trains them or beside them."""

    steady: ClassVar[bool] = False
    packs: ClassVar[bool] = True

    def merge(self, model: nn.Module) -> PreTrainedModel:
        """Return the model with every layer whole, as it was trained."""
        from stages.model.packed import release_packed

        release_packed(model)
        return model  # type: ignore[return-value]

    @staticmethod
    def shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of the decoder's linear layers."""
        from stages.model.packed import linears
        from stages.technique.blocks import layers_of

        found = [child for _, layer in layers_of(model) for *_, child in linears(layer)]
        return [(int(child.in_features), int(child.out_features)) for child in found]  # type: ignore[arg-type]


class BesideNumbers(InNumbers):
    """A technique whose whole numbers stay as they are; what `held` puts beside them trains, by AdamW."""

    embeddings: bool = Field(
        False, description="Train the embedding as well, and with it a head that shares its weight."
    )

    def held(self, layer: nn.Linear) -> nn.Module:
        """Return the layer as whole numbers, with what trains."""
        raise TypeError(f"{type(self).__name__} defines no held")

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return the model with its decoder's linear layers held in n bits; what is beside the numbers alone trains,
        and the embedding where asked for."""
        from stages.model.packed import hold
        from stages.technique.blocks import layers_of

        model.requires_grad_(False)
        for _, layer in layers_of(model):
            hold(layer, self.held)
        model.get_input_embeddings().requires_grad_(self.embeddings)
        return model

    def embedded(self, model: PreTrainedModel) -> int:
        """Return how many numbers of the embedding train."""
        return sum(item.numel() for item in model.get_input_embeddings().parameters()) if self.embeddings else 0

    def optimizer(
        self, model: nn.Module, train: TrainConfig, learning_rate: float, seed: int, states: States = "float32"
    ) -> Optimizer:
        """Return AdamW over what is beside the numbers."""
        from stages.technique.held import HeldAdam

        return HeldAdam(model, train, learning_rate, states)


def refuse_influence(technique: Technique) -> None:
    """Raise `ConfigError` where `train.influence` cannot be read from what `technique` trains."""
    if not technique.steady:
        raise ConfigError(
            "`train.influence` goes with a technique of backward passes, the same parameters and Adam's own moments",
            f"{type(technique).name()} is another",
            "unset `train.influence`, or list only `full`, `lora` or `qlora` in `plan.techniques`",
        )
