"""Peak bytes and modelled seconds of ways to train one model at its full depth, from traces of a shallow one.

A step of two layers (`Technique.traced_layers` says how many) and one of a layer more, all but the last recomputed, are
traced with two and with three rows, cut into pieces and put together again (`pieces.py`), for any number of rows and
any choice of recomputed blocks. Where layers are not alike, or are no more than that, all of them are traced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from data_contracts.config import TrainConfig
from data_contracts.records import ModelPin
from stages.gradients.passes import FORMED_BYTES
from stages.meter.flops import FlopModel
from stages.model.load import empty_model
from stages.plan.checkpointing import choose_blocks, least_blocks
from stages.plan.pieces import SPEEDS, Held, Pieces
from stages.plan.timeline import Timeline
from stages.plan.trace import Shape, trace_flops, trace_look, trace_step
from stages.technique.base import Technique
from stages.technique.batch_selector import batch_selector_of
from stages.technique.looking import sizes_of

ROWS = (2, 3)
"""Rows traced; with one, kernels may skip a copy that two need."""
PROCESS_BYTES = {"cpu": 640 * 2**20, "cuda": 640 * 2**20}
"""What is held beside the step. On a CPU: the resident size of a process that has loaded Python, torch, transformers,
PEFT, Arrow and the store's client (measured on Linux). On CUDA: context and library workspaces."""

LINKS = {"cpu": 1e9, "cuda": 1e11}
"""Bytes a second between workers, in round numbers: a network of 10 Gbit/s, a link between accelerators."""


@dataclass(frozen=True)
class PhaseBytes:
    """What is held at the dearest moment of one phase."""

    weights: int
    moments: int
    """Of the optimizer, and influence's direction (as large as one of them) where it is read in training."""
    gradients: int
    activations: int
    process: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.moments + self.gradients + self.activations + self.process


@dataclass(frozen=True)
class Priced:
    """What a step is predicted to take: bytes by phase, and modelled seconds."""

    phases: dict[str, PhaseBytes]
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The dearest phase."""
        return max(phase.total for phase in self.phases.values())


@dataclass
class Estimator:
    """Peaks and operations of ways to train one model; traces are made once each.

    Args:
        pin: the model.
        train: the optimizer's settings.
        device: "cpu" or "cuda".
        host: the device that activations and moments can be sent to, where it is another than `device`.
    """

    pin: ModelPin
    train: TrainConfig
    device: str
    host: str | None = None
    _pieces: dict[tuple[Shape, int, bool], Pieces] = field(default_factory=dict)
    _alike: bool | None = None
    _model: Any = None
    _read: dict[Technique, dict[str, int]] = field(default_factory=dict)
    _updates: dict[Technique, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.selector = batch_selector_of(self.train)
        self._plain = self.train.model_copy(update={"batch_selector": None})
        """What a traced step reads."""

    def price(self, shape: Shape, micro_batch: int, accumulation: int, recomputed: tuple[int, ...] = ()) -> Priced:
        """Return what a step of `accumulation` micro-batches of `micro_batch` rows takes.

        With one micro-batch the phases named "again" are left out; with updates inside the backward pass they are its
        second pass.
        """
        lengths = shape.technique.traced_lengths(shape.row_tokens)
        ways = [self._price(self._at(shape, length), micro_batch, accumulation, recomputed) for length in lengths]
        phases: dict[str, PhaseBytes] = {}
        for way in ways:
            for name, item in way.phases.items():
                phases[name] = max(phases.get(name, item), item, key=lambda phase: phase.total)
        return Priced(phases, max(way.seconds for way in ways))

    @staticmethod
    def _at(shape: Shape, length: int) -> Shape:
        """Return `shape` for rows of another length."""
        if length == shape.row_tokens:
            return shape
        answers = max(shape.loss_chunks, min(shape.answers, length) // shape.loss_chunks * shape.loss_chunks)
        return replace(shape, row_tokens=length, answers=answers)

    def _price(self, shape: Shape, micro_batch: int, accumulation: int, recomputed: tuple[int, ...]) -> Priced:
        pieces = self._cut(shape, micro_batch, again=bool(recomputed))
        again = tuple(place in recomputed for place in range(pieces.layers))
        held, seconds = pieces.walk(again, 2 if shape.update_in_backward else accumulation)
        weights, moments, grown = self._fixed(shape)
        phases = {name: self._phase(shape, item, weights, moments) for name, item in held.items()}
        took = sum((grown if name == "update" else 1.0) * value for name, value in seconds.items())
        if self.selector is not None:
            phases["select"] = self._looking(shape, phases, micro_batch, accumulation)
            passes = sum(value for name, value in seconds.items() if name != "update")
            took += self.selector.candidates * passes
        if shape.shards > 1:
            whole = self._fixed(replace(shape, shards=1))[0]
            sent = (1 - 1 / shape.shards) * (2 * whole + moments * shape.shards // 2)  # gathered twice, summed once
            took += accumulation * sent / LINKS[self.device]
            if self.device == "cpu":  # each worker loads the model before it keeps its part
                phases["load"] = PhaseBytes(whole, 0, 0, 0, PROCESS_BYTES[self.device])
        return Priced(phases, took)

    def phases(
        self, shape: Shape, micro_batch: int, accumulation: int, recomputed: tuple[int, ...] = ()
    ) -> dict[str, PhaseBytes]:
        """Return the bytes of each phase; see `price`."""
        return self.price(shape, micro_batch, accumulation, recomputed).phases

    def recomputing(self, shape: Shape, micro_batch: int, accumulation: int, allowed: int) -> tuple[int, ...] | None:
        """Return the blocks whose recomputation costs the least time of all choices that fit `allowed`; None if none.

        What is held all the time, the process included, counts too.
        """
        weights, moments, _ = self._fixed(shape)
        fixed = self._phase(shape, Held(0, 0), weights, moments).total
        passes = 2 if shape.update_in_backward else accumulation
        pieces = self._cut(shape, micro_batch, again=True)
        chosen = choose_blocks(pieces, passes, allowed - fixed)
        return None if chosen is None else tuple(place for place, again in enumerate(chosen) if again)

    def least(self, shape: Shape, micro_batch: int, accumulation: int) -> tuple[int, ...]:
        """Return the blocks whose recomputation gives the lowest peak."""
        passes = 2 if shape.update_in_backward else accumulation
        chosen = least_blocks(self._cut(shape, micro_batch, again=True), passes)
        return tuple(place for place, again in enumerate(chosen) if again)

    def _phase(self, shape: Shape, held: Held, weights: int, moments: int) -> PhaseBytes:
        direction = 0
        if self.train.influence:
            exact = self._fixed(replace(shape, optimizer_states="float32"))[1]
            direction = exact // 2 + FORMED_BYTES
        if self.selector is not None and self.selector.reads_target:
            direction += 4 * sum(self.read(shape.technique).values())
        return PhaseBytes(
            weights=weights,
            moments=moments + direction,
            gradients=held.gradients,
            activations=held.peak - held.gradients + self._lingering(shape),
            process=PROCESS_BYTES[self.device],
        )

    def _looking(
        self, shape: Shape, phases: Mapping[str, PhaseBytes], micro_batch: int, accumulation: int
    ) -> PhaseBytes:
        """Return what is held while candidates are looked at, at the most.

        Activations are at most those of training's own passes, which know no gradients here; beside them some rows'
        gradients of a layer, their change, and what is kept of the candidates so far.
        """
        assert self.selector is not None
        sizes = self.read(shape.technique)
        largest, rows = 4 * max(sizes.values()), micro_batch * accumulation * max(1, self.train.workers)
        kept = 4 * self.selector.numbers(sizes)
        held = kept * (rows * self.selector.candidates + micro_batch if self.device == "cpu" else micro_batch)
        formed = min(micro_batch * largest, max(FORMED_BYTES, largest))
        passes = max(phases[name].activations for name in ("forward", "backward"))
        compared = 2 * held if self.device == "cpu" else 0
        first = phases["forward"]
        return replace(first, gradients=0, activations=max(passes + 2 * formed + held, compared))

    def read(self, technique: Technique) -> dict[str, int]:
        """Return the sizes of the parameters that the batch selector reads, by name, at full depth."""
        assert self.selector is not None
        if technique not in self._read:
            model = technique.wrap(empty_model(self.pin))
            self._read[technique] = sizes_of(model, self.selector.read(model))
        return self._read[technique]

    def look(self, shape: Shape, recomputed: tuple[int, ...] = ()) -> FlopModel:
        """Return the operations of looking at a row: `train` of it; see `row_flops` of the selector for the rest."""
        assert self.selector is not None
        plain = replace(shape, optimizer_states="float32", loss_chunks=1, update_in_backward=False)
        settings: dict[str, Any] = {"selector": self.selector, "device": self.device}
        if not self._shallow(shape):
            layers = self.pin.layers
            return trace_look(self.pin, plain, layers=layers, recomputed=recomputed, **settings).rounded()
        one, two = (trace_look(self.pin, plain, layers=layers, **settings) for layers in (1, 2))
        full = one.deepened(two, self.pin.layers - 1)
        if recomputed:
            again = trace_look(self.pin, plain, layers=2, recomputed=(0,), **settings)
            full = full.plus(two, again, len(recomputed))
        return full.rounded()

    def _lingering(self, shape: Shape) -> int:
        """Return what gloo's threads give up late: a gathered block and its gradient, as `benchmarks.memory` has
        measured it. Threads differ from run to run."""
        if shape.shards == 1 or self.device != "cpu":
            return 0
        trace = self._traces(shape, again=False)[0]
        own = zip(trace.block_weights, trace.block_moments, strict=True)
        return shape.shards * max((weights + moments // 2 for weights, moments in own), default=0)

    def scoring(self, shape: Shape, trainable: int) -> dict[str, int]:
        """Return the bytes of influence of one row on one target group, by form.

        Backward: weights, the direction, and all activations (nothing is recomputed); the taps keep what training's
        weight gradients would have kept. Forward: a copy of what is moved instead, and one layer's share of those.
        """
        phases = self.phases(
            replace(shape, packed=False, update_in_backward=False, loss_chunks=1, shards=1, offload_activations=False),
            1,
            1,
        )
        weights, process = self._fixed(replace(shape, precision="float32", shards=1))[0], phases["forward"].process
        activations = max(phases[name].activations for name in ("forward", "backward"))
        moved = 4 * trainable
        return {
            "backward": process + weights + moved + activations,
            "forward": process + weights + 2 * moved + math.ceil(activations / self.pin.layers),
        }

    def flops(self, shape: Shape, recomputed: tuple[int, ...] = ()) -> FlopModel:
        """Return the operations of a forward and of a training pass, blocks recomputed or not; other savings are not
        part of it (see `stages.technique.cost`)."""
        plain = replace(
            shape,
            optimizer_states="float32",
            loss_chunks=1,
            update_in_backward=False,
            shards=1,
            offload_activations=False,
        )

        def traced(layers: int, places: tuple[int, ...] = ()) -> FlopModel:
            return trace_flops(self.pin, plain, layers=layers, device=self.device, recomputed=places)

        if not self._shallow(shape):
            return traced(self.pin.layers, recomputed).rounded()
        low, high = shape.technique.priced_layers
        one = traced(low)
        full = one.deepened(traced(high), Fraction(self.pin.layers - low, high - low))
        return (full.plus(one, traced(low, (0,)), len(recomputed)) if recomputed else full).rounded()

    def _shallow(self, shape: Shape) -> bool:
        if self._alike is None:
            self._alike = _layers_alike(self.pin)
        return self._alike and shape.technique.whole and self.pin.layers > self._depth(shape) + 1

    @staticmethod
    def _depth(shape: Shape) -> int:
        """Return how many layers are traced. While a spread layer's backward pass ends, the last but one is gathered:
        the third is the first like all further ones, and another the last."""
        least = 4 if shape.shards > 1 else 3 if shape.offload_activations else 0  # see `Probing.traced_layers`
        return max(shape.technique.traced_layers, least)

    def _traces(self, shape: Shape, again: bool) -> tuple[Timeline, Timeline]:
        shallow = self._shallow(shape)
        if shape.optimizer_states != "float32" and not shape.update_in_backward:  # its passes are those of float32
            few, more = self._traces(replace(shape, optimizer_states="float32"), again)
            if again:
                return few, more
            layers = self._depth(shape) if shallow else self.pin.layers
            own = self._trace(replace(shape, loss_chunks=1), layers, ROWS[0])
            return few.with_update(own), more.with_update(own)
        layers = self._depth(shape) + again if shallow else self.pin.layers
        places = tuple(range(layers - 1 if shallow else layers)) if again else ()

        return self._trace(shape, layers, ROWS[0], places), self._trace(shape, layers, ROWS[1], places)

    def _trace(self, shape: Shape, layers: int, rows: int, recomputed: tuple[int, ...] = ()) -> Timeline:
        settings: dict[str, Any] = {"layers": layers, "rows": rows, "device": self.device, "host": self.host or "cpu"}
        return trace_step(self.pin, shape, self._plain, **settings, recomputed=recomputed)

    def _cut(self, shape: Shape, micro_batch: int, *, again: bool) -> Pieces:
        key = (shape, micro_batch, again)
        if key not in self._pieces:
            kept = self._traces(shape, again=False)
            layers = self.pin.layers if kept[0].block_weights else 0
            self._pieces[key] = Pieces(
                kept,
                self._traces(shape, again=True) if again and layers else None,
                layers,
                (micro_batch - ROWS[0]) / (ROWS[1] - ROWS[0]),
                speed=SPEEDS[self.device],
                precision=shape.precision,
                update=self._updating(shape.technique),
            )
            self._pieces[key].gathers = shape.shards > 1
        return self._pieces[key]

    def _fixed(self, shape: Shape) -> tuple[int, int, float]:
        """Return the bytes of weights and moments at full depth, and moments over those traced."""
        trace = self._traces(shape, again=False)[0]
        more = self.pin.layers - len(trace.block_weights) if self._shallow(shape) else 0
        weights = trace.weights + (more * trace.block_weights[-1] if more else 0)
        moments = trace.moments + (more * trace.block_moments[-1] if more else 0)
        if type(shape.technique).moment_bytes is not Technique.moment_bytes:
            moments = shape.technique.moment_bytes(self._whole()) or moments
        return weights, moments, moments / trace.moments if trace.moments else weights / trace.weights

    def _updating(self, technique: Technique) -> int | None:
        """Return what the update holds where a technique says it; see `Technique.update_bytes`."""
        if technique not in self._updates:
            told = type(technique).update_bytes is not Technique.update_bytes
            self._updates[technique] = technique.update_bytes(self._whole(), self.device) if told else None
        return self._updates[technique]

    def _whole(self) -> Any:
        """Return the model at full depth, on the meta device."""
        self._model = self._model or empty_model(self.pin)
        return self._model


def _layers_alike(pin: ModelPin) -> bool:
    """Return whether all decoder layers have the same weights by name and shape, and the config no list of kinds."""
    model = empty_model(pin)
    kinds = getattr(model.config, "layer_types", None) or ()
    if len(set(kinds)) > 1:
        return False
    layers: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, item in model.named_parameters():
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        if numbers:
            layers.setdefault(parts[numbers[0]], []).append((".".join(parts[numbers[0] + 1 :]), tuple(item.shape)))
    return len(layers) == pin.layers and all(item == layers["0"] for item in layers.values())
