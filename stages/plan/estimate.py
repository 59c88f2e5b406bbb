"""Peak bytes of any number of rows at the model's full depth, from four traces of shallow ones.

Every operator of a step holds bytes that are linear in the rows and, at a given place in the first or last layer,
linear in the depth; so each operator is extrapolated by itself and the maximum is taken last. (Extrapolating the peak
itself fails where it moves from one phase to another.) The layers between lie between the first and the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from data_contracts.config import TrainConfig
from data_contracts.errors import ModelError
from data_contracts.records import ModelPin
from stages.gradients.passes import FORMED_BYTES
from stages.meter.flops import FlopModel
from stages.model.load import empty_model
from stages.plan.timeline import UPDATE, Timeline, phase_of
from stages.plan.trace import Shape, trace_flops, trace_step

ROWS = (2, 3)
"""Rows traced; with one, kernels may skip a copy that two need."""
PROCESS_BYTES = {"cpu": 640 * 2**20, "cuda": 640 * 2**20}
"""What is held beside the step. On a CPU: the resident size of a process that has loaded Python, torch, transformers,
PEFT, Arrow and the store's client (measured on Linux). On CUDA: context and library workspaces."""


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


@dataclass
class Estimator:
    """Peaks and operations of ways to train one model; traces are made once each.

    Args:
        pin: the model.
        train: the optimizer's settings.
        device: "cpu" or "cuda".
    """

    pin: ModelPin
    train: TrainConfig
    device: str
    _traces: dict[Shape, list[list[Timeline]]] = field(default_factory=dict)
    _alike: bool | None = None

    def phases(self, shape: Shape, micro_batch: int, accumulation: int) -> dict[str, PhaseBytes]:
        """Return the bytes of each phase of a step of `accumulation` micro-batches of `micro_batch` rows.

        With one micro-batch no phase meets gradients of an earlier one, and the phases named "again" are left out.
        """
        lengths = shape.technique.traced_lengths(shape.row_tokens)
        shapes = [replace(shape, row_tokens=length, answers=min(shape.answers, length)) for length in lengths]
        held: dict[str, PhaseBytes] = {}
        for each in shapes:
            for phase, found in self._phases(each, micro_batch, accumulation):
                if phase not in held or found.total > held[phase].total:
                    held[phase] = found
        return held

    def _phases(self, shape: Shape, micro_batch: int, accumulation: int) -> Iterator[tuple[str, PhaseBytes]]:
        """Yield each part of the step of rows of one length: its phase and what it holds."""
        traces = self._traced(shape)
        depths = self._depths(shape)
        steps = (self.pin.layers - depths[0]) / (depths[1] - depths[0]) if len(depths) > 1 else 0.0
        extra = (micro_batch - ROWS[0]) / (ROWS[1] - ROWS[0])

        def along_rows(depth: int, name: str, what: str) -> np.ndarray:
            low, high = (getattr(line, what)[name] for line in traces[depth])
            return np.asarray(low + extra * (high - low))

        def at_full_depth(name: str, what: str) -> np.ndarray:
            values = [along_rows(depth, name, what) for depth in range(len(depths))]
            if len(values) == 1:
                return values[0]
            if (
                phase_of(name) == UPDATE
            ):  # loops over parameters, not layers: the largest one's temporaries on all gradients
                return np.array([_line([float(item.max()) for item in values], steps)])
            return _deepen(traces[0][0].ops[name], traces[1][0].ops[name], values[0], values[1], steps)

        for name in traces[0][0].ops:
            phase = phase_of(name)
            if accumulation == 1 and phase.endswith("again"):
                continue
            live = at_full_depth(name, "live")
            waiting = at_full_depth(name, "gradients")
            at = int(np.argmax(live))
            moments = _line([trace[0].moments for trace in traces], steps)
            yield (
                phase,
                PhaseBytes(
                    weights=_line([trace[0].weights for trace in traces], steps),
                    moments=moments + (moments // 2 + FORMED_BYTES if self.train.influence else 0),
                    gradients=round(waiting[at]),
                    activations=round(live[at]) - round(waiting[at]),
                    process=PROCESS_BYTES[self.device],
                ),
            )

    def scoring(self, shape: Shape, trainable: int) -> dict[str, int]:
        """Return the bytes of influence of one row on one target group, by form.

        Backward: weights, the direction, and all activations (nothing is recomputed); the taps keep what training's
        weight gradients would have kept. Forward: a copy of what is moved instead, and one layer's share of those.
        """
        phases = self.phases(replace(shape, checkpoint_activations=False, packed=False), 1, 1)
        weights, process = phases["forward"].weights, phases["forward"].process
        activations = max(phases[name].activations for name in ("forward", "backward") if name in phases)
        moved = 4 * trainable
        return {
            "backward": process + weights + moved + activations,
            "forward": process + weights + 2 * moved + math.ceil(activations / self.pin.layers),
        }

    def flops(self, shape: Shape) -> FlopModel:
        """Return the operations of a forward and of a training pass."""
        depths = self._depths(shape)
        first = trace_flops(self.pin, shape, layers=depths[0], device=self.device)
        if len(depths) == 1:
            return first.rounded()
        second = trace_flops(self.pin, shape, layers=depths[1], device=self.device)
        return first.deepened(second, self.pin.layers - depths[0]).rounded()

    def _depths(self, shape: Shape) -> tuple[int, ...]:
        if self._alike is None:
            self._alike = _layers_alike(self.pin)
        shallow = shape.technique.traced_depths()
        return shallow if self._alike and self.pin.layers > shallow[-1] else (self.pin.layers,)

    def _traced(self, shape: Shape) -> list[list[Timeline]]:
        """Return traces by depth, then by rows."""
        if shape not in self._traces:
            traces = [
                [trace_step(self.pin, shape, self.train, layers=depth, rows=rows, device=self.device) for rows in ROWS]
                for depth in self._depths(shape)
            ]
            for few, more in traces:
                if few.ops != more.ops:
                    raise ModelError(
                        "a step runs the same operators whatever the number of rows",
                        "another sequence was traced with one row more",
                        "use a model whose forward pass does not depend on the batch",
                    )
            self._traces[shape] = traces
        return self._traces[shape]


def _line(values: Sequence[float], steps: float) -> int:
    return round(values[0] if len(values) == 1 else values[0] + steps * (values[1] - values[0]))


def _deepen(shallow: list[str], deep: list[str], low: np.ndarray, high: np.ndarray, steps: float) -> np.ndarray:
    """Return each operator's bytes at full depth: the shallow trace's operators, counted from the start and the end.

    From the start, operator i of both traces is the same place for as long as the sequences agree (all before, and the
    first layer); from the end likewise (the last layer and all after).
    """
    start = _agreeing(shallow, deep)
    end = _agreeing(shallow[::-1], deep[::-1])
    if start + end < len(shallow):
        raise ModelError(
            "a deeper model runs the same operators, with more layers between",
            f"{len(shallow) - start - end} of {len(shallow)} operators have no counterpart",
            "use a model with layers that are alike",
        )
    if start + end - len(shallow) >= 2 * (len(deep) - len(shallow)) > 0:
        # a first and a last layer of their own: each is counted from its side alone, or a first layer that holds less
        # than the next would be taken for a slope
        start = (start + len(shallow) - end) // 2
        end = len(shallow) - start
    head = low[:start] + steps * (high[:start] - low[:start])
    tail = low[len(low) - end :] + steps * (high[len(high) - end :] - low[len(low) - end :])
    return np.concatenate([head, tail])


def _agreeing(one: list[str], other: list[str]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


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
