"""Adam on one layer at a time, the others held in few bits, beside a slope read by forward passes alone.

The layer at hand stands in float32; leaving it packs it again with stochastic rounding. A window moves it by AdamW on
g₁, from backward passes. What lies outside the layers (embeddings, last norm, a head of its own) stands whole too, but
its gradients and moments would be dear: it moves by −lr·α·g₀·z, where g₀ is the slope along a Gaussian direction z of
its weights (see `zeroth.py`). Which rows give which of the two is `mixed.py`'s. The embedding may take turns like a
layer; while it is at hand it has AdamW alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from stages.meter.flops import FlopModel, recomputed
from stages.model.batch import TokenBatch
from stages.model.loss import plain
from stages.model.packed import Bits, PackedLinear, hold, linears
from stages.technique.blocks import Schedule, Turns, layers_of, outer_blocks
from stages.technique.gaussian import Gaussian
from stages.technique.mixed import both_ways
from stages.technique.optimizer import How, moments_in, named_moments, set_rate, stood
from stages.technique.step import StepResult, load_moments, moments_of, optimizer_for, trainable
from stages.technique.zeroth import generator

if TYPE_CHECKING:
    from data_contracts.config import TrainConfig

WHOLE = "whole."


def pack_layers(model: nn.Module, bits: Bits | None) -> None:
    """Pack every linear layer inside the decoder's layers, rounding to the nearest, in place; None packs none."""
    if bits is None:
        return
    for _, layer in layers_of(model):
        hold(layer, lambda child: PackedLinear(child, bits))


def parts_of(model: nn.Module, embeddings: bool) -> list[tuple[str, nn.Module]]:
    """Return (name in `model`, module) of what takes turns: the layers, after the embedding where it does too."""
    embedding = plain(model).get_input_embeddings()
    found = [(name, module) for name, module in model.named_modules() if embeddings and module is embedding]
    return [*found, *layers_of(model)]


def size_of_part(part: nn.Module) -> int:
    """Return how many numbers a part holds, packed ones too."""
    packed = [child for *_, child in linears(part) if isinstance(child, PackedLinear)]
    return sum(item.numel() for item in part.parameters()) + sum(
        child.in_features * child.out_features for child in packed
    )


class PackedBlocks(Turns):
    """AdamW on the layer that stands whole.

    Args:
        model: its layers packed by `pack_layers`.
        parts: what takes turns, from `parts_of`.
        schedule: which of them trains when; its seed also decides directions and rounding.
        train, rate: AdamW's settings.
        bits: of the layers that wait; None holds them whole.
        share: α, the zeroth-order step's rate over AdamW's; 0 reads no slope, but for the losses of longer rows.
        epsilon: how far weights are moved to read the slope.
        long_tokens: padded length above which rows are read by forward passes alone; None reads every row both ways.
    """

    def __init__(
        self, model: nn.Module, parts: Sequence[tuple[str, nn.Module]], schedule: Schedule, train: TrainConfig,
        rate: float, *, bits: Bits | None, share: float, epsilon: float, long_tokens: int | None,
    ) -> None:  # fmt: skip
        super().__init__(model, schedule)
        self.parts, self._train, self._rate = parts, train, rate
        self.bits, self.share, self.epsilon, self.long_tokens = bits, share, epsilon, long_tokens
        below, above = outer_blocks(model)
        self.outside = {**below, **above}
        self._enter(0)

    def _enter(self, period: int) -> None:
        self.period, self.updates = period, 0
        layer = self.parts[self.block][1]
        self.model.requires_grad_(False)
        for parent, key, _, child in linears(layer):
            if isinstance(child, PackedLinear):
                setattr(parent, key, child.plain())
        layer.requires_grad_(True)
        self.adamw = optimizer_for(self.model, self._train, self._rate)
        undecayed = self._train.model_copy(update={"weight_decay": 0.0})
        waiting = {name: item for name, item in self.outside.items() if not item.requires_grad}
        self.probe = Gaussian(self.model, undecayed, self.epsilon, self.schedule.seed, waiting)

    def _leave(self) -> None:
        """Pack the layer at hand; its moments go first, so that nothing stands twice."""
        name, layer = self.parts[self.block]
        del self.adamw, self.probe
        layer.requires_grad_(False)
        if self.bits is None:
            return
        for parent, key, path, child in linears(layer):
            weight = cast(nn.Linear, child).weight
            source = generator(weight.device, self.schedule.seed, self.period, name, path)
            uniform = torch.rand(weight.shape, generator=source, device=weight.device)
            setattr(parent, key, PackedLinear(cast(nn.Linear, child), self.bits, uniform))

    def step(self, window: Sequence[TokenBatch], rate: float, **how: Unpack[How]) -> StepResult:
        """Take one step of AdamW on the layer that the window belongs to."""
        if (period := self.schedule.period(self.windows)) != self.period:
            self._leave()
            self._enter(period)
        set_rate(self.adamw, rate)
        self.probe.windows = self.windows
        split = math.inf if self.long_tokens is None and not self.share else self.long_tokens
        result, moved, slope = both_ways(self.model, self.adamw, self.probe, window, how, split)
        if slope is not None and self.share:
            self.probe.descend(slope, self.share * rate)
        self.windows, self.updates = self.windows + 1, self.updates + moved
        return result

    def weights(self) -> Mapping[str, Tensor]:
        """Return codes, scales and norms of the layers that wait, and what lies outside them; what is at hand is in
        `tensors`."""
        found: dict[str, Tensor] = dict(self.probe.named)
        for name, layer in self.parts:
            found |= {f"{name}.{inner}": item for inner, item in layer.named_parameters() if not item.requires_grad}
            found |= {f"{name}.{inner}": item for inner, item in layer.named_buffers()}
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments of the layer at hand, and its weights: a checkpoint is packed again on loading."""
        whole = {WHOLE + name: item.detach() for name, item in trainable(self.model).items()}
        return named_moments(moments_of(self.adamw, self.model)) | whole

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on in the same stay with the same draws."""
        self._leave()
        self.schedule = replace(self.schedule, seed=int(plain["seed"]))
        self._enter(int(plain["period"]))
        super().restore(plain, tensors)
        with torch.no_grad():
            for name, item in trainable(self.model).items():
                item.copy_(tensors[WHOLE + name])
        if self.updates:
            load_moments(self.adamw, self.model, moments_in(tensors), self.updates)

    def stand(self) -> dict[str, list[Tensor]]:
        """Enter what is dearest with zero moments; return what is held.

        For the lowest most activations are kept; of embeddings and the layer above them the larger counts.
        """
        self._leave()
        lowest = max(
            range(min(self.layer_numbers()) + 1), key=lambda number: (size_of_part(self.parts[number][1]), -number)
        )
        self._enter(next(period for period in range(len(self.parts)) if self.schedule.block(period) == lowest))
        self.windows = self.period * self.schedule.stay
        return stood(self.adamw, self.model)

    def layer_numbers(self) -> set[int]:
        """Return the numbers of the parts that are layers."""
        return set(range(len(self.parts) - len(layers_of(self.model)), len(self.parts)))

    def _priced_block(self, block: int) -> FlopModel:
        """Trace the two highest layers, the others, which are alike, lie on their line; and add the forward passes."""
        top = len(self.parts) - 1
        near = top - block < 2 or block not in self.layer_numbers() or recomputed(self.model)
        found = self._traced(block if near else top)
        if not near:
            found = found.deepened(self._traced(top - 1), top - block)
        if self.long_tokens is not None:
            return replace(found, forward_above=self.long_tokens)
        return found.probing(2) if self.share else found

    def _traced(self, block: int) -> FlopModel:
        """Trace a training of one layer, which stands whole meanwhile, without changing anything."""
        layer, packed = self.parts[block][1], []
        for parent, key, _, child in linears(layer):
            if isinstance(child, PackedLinear):
                packed.append((parent, key, child))
                setattr(parent, key, child.plain())
        try:
            self.model.requires_grad_(False)
            layer.requires_grad_(True)
            return FlopModel.trace(self.model, train=True)
        finally:
            for parent, key, child in packed:
                setattr(parent, key, child)
            self.model.requires_grad_(False)
            self.parts[self.block][1].requires_grad_(True)
