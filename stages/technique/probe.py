"""Probes: short trainings of low-rank adapters beside a model that stays, and the model between several of them.

`train_adapter` leaves the model as it was and returns what was learnt; `interpolated` gives the weights
θ + Σ_a x_a Δ_a for as long as its context lasts and restores every byte. What a probe trains on, and charging for it,
is the caller's business. Shapes of an adapter's layer: r rank, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_contracts.config import TrainConfig
from stages.model.batch import TokenBatch
from stages.technique.methods.lora import Lora
from stages.technique.step import optimizer_for, optimizer_step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DOWN, UP = "down.", "up."


@dataclass(frozen=True)
class Adapter:
    """Low-rank updates by layer name.

    Attributes:
        down: A_rI; up: B_Or, the scale alpha / r included: a layer's update is B A.
        transposed: layers whose weight is stored as (inputs, outputs).
    """

    down: dict[str, Tensor]
    up: dict[str, Tensor]
    transposed: frozenset[str] = frozenset()

    def update(self, name: str) -> Tensor:
        """Return the update of one layer's weight, in its layout."""
        found = self.up[name] @ self.down[name]
        return found.T if name in self.transposed else found

    def save(self, path: Path) -> None:
        """Write it to one safetensors file."""
        stored = {DOWN + name: value for name, value in self.down.items()}
        stored |= {UP + name: value for name, value in self.up.items()}
        held = {name: value.detach().cpu().contiguous() for name, value in stored.items()}
        save_file(held, path, metadata={"transposed": "\n".join(sorted(self.transposed))})

    @classmethod
    def load(cls, path: Path, model: Any) -> Adapter:
        """Read what `save` wrote, for `model`'s layers and on its device."""
        stored = load_file(path, device=str(model.device))
        down = {name.removeprefix(DOWN): value for name, value in stored.items() if name.startswith(DOWN)}
        up = {name.removeprefix(UP): value for name, value in stored.items() if name.startswith(UP)}
        turned = frozenset(name for name in down if not isinstance(model.get_submodule(name), torch.nn.Linear))
        return cls(down, up, turned)


def train_adapter(
    model: PreTrainedModel,
    windows: Iterable[Sequence[TokenBatch]],
    *,
    lora: Lora,
    train: TrainConfig,
    learning_rate: float,
    seed: int,
    precision: str = "float32",
) -> Adapter:
    """Return the adapter after one optimizer step a window, at a rate that rises to `learning_rate` in a tenth of them.

    Args:
        model: stays as it is, byte for byte; its adapters, if it had any, are merged.
        windows: micro-batches of each step, on the model's device.
        lora: rank and scale.
        train: settings of the optimizer and of clipping.
        learning_rate: of AdamW, constant after the warm-up.
        seed: of the adapter's initial values; equal seeds start equal, so that adapters can be added up.
        precision: "bfloat16" runs the forward pass under autocast.
    """
    steps = list(windows)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        wrapped: Any = lora.wrap(model)
        wrapped.train()
        optimizer = optimizer_for(wrapped, train, learning_rate)
        warm = max(1, len(steps) // 10)
        for number, batches in enumerate(steps, start=1):
            for options in optimizer.param_groups:
                options["lr"] = learning_rate * min(1.0, number / warm)
            optimizer_step(wrapped, optimizer, batches, clip=train.clip, precision=precision)
    down, up, turned = dict[str, Tensor](), dict[str, Tensor](), set[str]()
    for name, layer in wrapped.base_model.model.named_modules():
        if hasattr(layer, "lora_A"):
            down[name] = layer.lora_A["default"].weight.detach().clone()
            up[name] = layer.lora_B["default"].weight.detach() * layer.scaling["default"]
            turned |= {name} if layer.fan_in_fan_out else set()
    wrapped.unload()
    model.eval()
    return Adapter(down, up, frozenset(turned))


@contextmanager
def interpolated(model: Any, adapters: Sequence[Adapter], share_A: Sequence[float]) -> Iterator[None]:
    """Let `model` compute with θ + Σ_a x_a Δ_a inside the context; a copy of the adapted weights is held meanwhile."""
    names = sorted({name for adapter in adapters for name in adapter.down})
    kept = {name: model.get_submodule(name).weight.detach().clone() for name in names}
    try:
        with torch.no_grad():
            for adapter, share in zip(adapters, share_A, strict=True):
                for name in adapter.down:
                    model.get_submodule(name).weight.add_(adapter.update(name), alpha=float(share))
        yield
    finally:
        with torch.no_grad():
            for name, weight in kept.items():
                model.get_submodule(name).weight.copy_(weight)
