"""LoRA: the weights stay, a product of two thin matrices is learnt beside each linear layer.

W x becomes W x + (alpha / r) B A x with B = 0 at the start, so training starts from the base exactly. Memory for
gradients and moments falls to the adapters' share; the forward pass costs a little more. Built by PEFT. Embeddings
stay too, unless asked for: text unlike what the model has read asks most of them (`benchmarks.convergence`).
Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, ClassVar, get_args

from pydantic import Field

from data_contracts.config import Saving
from data_contracts.errors import MethodError
from stages.technique.base import Technique

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class Lora(Technique):
    """Train low-rank adapters on linear layers.

    The default peak learning rate, 2e-4, is that of Dettmers et al. 2023 (QLoRA, table 9) for models up to 13B: about
    ten times full fine-tuning's. Rank and alpha = 2 r on all linear layers follow Biderman et al. 2024 (LoRA Learns
    Less and Forgets Less, section 5).
    """

    learning_rate: ClassVar[float] = 2e-4
    savings: ClassVar[frozenset[Saving]] = frozenset(get_args(Saving))

    r: int = Field(16, ge=1, le=4096, description="Rank of an adapter. Hu et al. 2021.")
    alpha: float = Field(32.0, gt=0, le=65536, description="The update is scaled by alpha / r. Hu et al. 2021.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of an adapter's inputs dropped in training.")
    target_modules: tuple[str, ...] = Field(
        (), description="Names of linear layers, such as q_proj; unset is all of them but the output head."
    )
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r) instead. Kalajdzievski 2023.")
    use_dora: bool = Field(False, description="Learn a magnitude for each output too. Liu et al. 2024 (DoRA).")
    embeddings: bool = Field(
        False, description="Train the embedding whole as well, and with it a head that shares its weight."
    )

    def wrap(self, model: PreTrainedModel) -> nn.Module:
        """Return a PEFT model; only adapter parameters have `requires_grad`, and the embedding's where it trains.

        Raises `MethodError` for a target that names no linear layer, and for a head that shares the embedding's weight.
        """
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            target_modules=sorted({name for name, _ in self._targets(model)}),
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
            bias="none",
            task_type="CAUSAL_LM",
        )
        wrapped = get_peft_model(model, config)
        model.get_input_embeddings().requires_grad_(self.embeddings)
        return wrapped

    def in_four_bits(self) -> Technique | None:
        """Return QLoRA with the same adapters; none with DoRA, and where bitsandbytes is not installed."""
        from stages.technique.states import has_8bit

        if self.use_dora or not has_8bit():
            return None
        from stages.technique.methods.qlora import Qlora

        return Qlora(**self.model_dump())

    def merge(self, model: nn.Module) -> PreTrainedModel:
        """Return the base with the adapters added to its weights, its ties kept."""
        from stages.model.checkpoint import merge_adapters

        return merge_adapters(model)

    def trainable_count(self, model: PreTrainedModel) -> int:
        """Return the sum over targets of r (inputs + outputs), outputs again with DoRA, and the embedding's numbers."""
        adapters = sum(
            self.r * (inputs + outputs) + (outputs if self.use_dora else 0)
            for _, (inputs, outputs) in self._targets(model)
        )
        embedding = model.get_input_embeddings().parameters() if self.embeddings else ()
        return adapters + sum(item.numel() for item in embedding)

    def _targets(self, model: PreTrainedModel) -> list[tuple[str, tuple[int, int]]]:
        """Return (full module name, (inputs, outputs)) of every layer that gets an adapter, in the model's order."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        linear = {name: shape for name, module in model.named_modules() if (shape := _linear_shape(module))}
        body = {name: shape for name, shape in linear.items() if model.get_submodule(name) is not head}
        if not self.target_modules:
            return list(body.items())
        chosen = {
            name: shape
            for name, shape in linear.items()
            if any(name == target or name.endswith(f".{target}") for target in self.target_modules)
        }
        known = sorted({name.rpartition(".")[2] for name in linear})
        for target in self.target_modules:
            if not any(name == target or name.endswith(f".{target}") for name in linear):
                close = difflib.get_close_matches(target, known, n=2, cutoff=0.5)
                raise MethodError(
                    "`target_modules` of lora names linear layers of the model",
                    f"no linear layer of {type(model).__name__} is called {target!r}",
                    f"did you mean {' or '.join(map(repr, close))}?" if close else f"one of: {', '.join(known)}",
                )
        if any(model.get_submodule(name) is head for name in chosen) and head.weight is embedding.weight:
            raise MethodError(
                "an adapter's layer owns its weight",
                "the output head shares its weight with the embedding: merging would change both",
                "leave the head out of `target_modules`",
            )
        return list(chosen.items())


def _linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """Return (inputs, outputs) of a linear layer (torch's, or GPT-2's transposed one), else None."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.weight.shape[1])
    return None
