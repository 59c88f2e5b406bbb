"""A step of any depth, rows and choice of recomputed blocks, put together from pieces of a few shallow traces.

A piece is what one block (or what stands before or after all blocks) adds to the bytes held, how far it goes above
where it began, and how long it takes. Every operator's bytes are linear in the rows, so each is extrapolated by itself
and maxima are taken last; a step is then a walk over pieces, each starting where the one before ended. (Extrapolating
the peak itself fails where it moves from one phase to another.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from data_contracts.errors import ModelError
from stages.plan.timeline import AFTER, BEFORE, PHASES, Stretch, Timeline

PASSES = (("forward", "backward"), ("forward again", "backward again"))


@dataclass(frozen=True)
class Speed:
    """What a device is modelled to do: operations and bytes a second, and seconds an operator takes at least.

    Only ratios matter for a plan. An operator takes the longer of its operations and its bytes (Williams, Waterman &
    Patterson 2009, the roofline).
    """

    flops: dict[str, float]
    bytes: float
    launch: float


SPEEDS = {
    "cpu": Speed({"float32": 1e11, "bfloat16": 2e11}, 2e10, 2e-6),
    "cuda": Speed({"float32": 2e13, "bfloat16": 2e14}, 1.5e12, 5e-6),
}
"""A server core complex and an accelerator of the A100's class, in round numbers: dense rates reached, not peaks."""


@dataclass(frozen=True)
class Piece:
    """Bytes and seconds of a stretch.

    Attributes:
        delta: bytes held at its end less those at its start.
        peak: most held inside less those at its start.
        gradients, gradients_at_peak: of waiting gradients, in the whole stretch and up to its peak.
        released: bytes of a block's forward pass that are given up after the last block.
        seconds: modelled.
    """

    delta: int = 0
    peak: int = 0
    gradients: int = 0
    gradients_at_peak: int = 0
    released: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Held:
    """The dearest moment of a phase: all bytes beyond weights and moments, and those of them that are gradients."""

    peak: int
    gradients: int


def piece_of(few: Stretch, more: Stretch, extra: float, speed: Speed, precision: str) -> Piece:
    """Return the piece at `extra` rows past those of `few`, in units of the rows between `few` and `more`.

    Raises `ModelError` where the two ran other operators.
    """
    if few.ops != more.ops:
        raise ModelError(
            "a step runs the same operators whatever the number of rows",
            "another sequence was traced with one row more",
            "use a model whose forward pass does not depend on the batch",
        )

    def at(name: str) -> np.ndarray:
        low, high = (np.asarray(getattr(item, name), dtype=np.float64) for item in (few, more))
        return np.asarray(low + extra * (high - low))

    start, end, released = (float(at(name)) for name in ("start", "end", "released"))
    if not few.ops:
        return Piece(round(end - start), 0, released=round(released))
    live, gradients = at("live"), at("gradients")
    at_peak = int(np.argmax(live))
    seconds = np.maximum(at("flops") / speed.flops[precision], at("moved") / speed.bytes)
    return Piece(
        round(end - start),
        max(0, round(live[at_peak] - start)),
        round(gradients[-1]),
        round(gradients[at_peak]),
        round(released),
        float((seconds + speed.launch * (at("moved") > 0)).sum()),
    )


class Pieces:
    """All pieces of one way of training at one number of rows.

    Args:
        kept: traces (with few rows and one more) in which every block keeps its activations.
        again: traces in which all blocks but the last, or all, are recomputed; None where that may not be chosen.
        layers: of the model; with more than were traced, the last traced block but one stands for further ones (of two,
            the last, which the head follows at once).
        extra, speed, precision: see `piece_of`.
        update: bytes that the update goes above where it begins, where that does not follow from the traces.
    """

    passes: float = 1.0
    """Forward passes that a micro-batch takes."""
    gathers: bool = False
    """Whether a block gathers others' weights while it ends, which the last one does not: they are spread."""

    def __init__(
        self,
        kept: tuple[Timeline, Timeline],
        again: tuple[Timeline, Timeline] | None,
        layers: int,
        extra: float,
        *,
        speed: Speed,
        precision: str,
        update: int | None = None,
    ) -> None:
        self.layers = layers
        self._found = {False: _by_phase(kept, extra, speed, precision)}
        if update is not None:
            before, blocks, after = self._found[False]["update"]
            self._found[False]["update"] = (before, blocks, replace(after, peak=update))
        if again is not None:
            self._found[True] = _by_phase(again, extra, speed, precision)
        self.start = kept[0].stretches["forward"][0].start
        self.passes = kept[0].passes

    def block(self, phase: str, place: int, again: bool) -> Piece:
        """Return the piece of block `place`."""
        blocks = self._found[again][phase][1]
        if len(blocks) == self.layers or (len(blocks) > 2 and place == self.layers - 1 and not again):
            return blocks[place - self.layers]
        found = blocks[min(place, max(1, len(blocks) - 2))]
        if self.gathers and again and place == self.layers - 1:  # it was traced before another, which it gathers
            *_, before, last = self._found[False][phase][1]
            return replace(found, delta=found.delta + last.delta - before.delta)
        return found

    def before(self, phase: str, first_again: bool) -> Piece:
        """Return the piece before the first block (in a backward pass: after it), by the first block's choice."""
        return self._found[first_again][phase][0]

    def after(self, phase: str, first_again: bool) -> Piece:
        """Return the piece after the last block, none of the blocks' releases counted."""
        return self._found[first_again][phase][2]

    def walk(self, again: Sequence[bool], micro_batches: int) -> tuple[dict[str, Held], dict[str, float]]:
        """Return each phase's dearest moment and its seconds in a step, where block i is recomputed if `again[i]`.

        With one micro-batch no phase meets gradients of an earlier one, and the phases named "again" are left out. The
        update's seconds are those of the traced depth.
        """
        level, waiting = self.start, 0
        held, seconds = {}, {}
        for name in PHASES:
            often = micro_batches - 1 if name.endswith("again") else 1
            if not often:
                continue
            most, at_most, took = level, waiting, 0.0
            for piece in self._order(name, again):
                if level + piece.peak > most:
                    most, at_most = level + piece.peak, waiting + piece.gradients_at_peak
                level, waiting, took = level + piece.delta, waiting + piece.gradients, took + piece.seconds
            forward = self.passes if name.startswith("forward") else 1
            held[name], seconds[name] = Held(most, at_most), often * took * forward
        return held, seconds

    def _order(self, name: str, again: Sequence[bool]) -> Iterator[Piece]:
        first = bool(again and again[0])
        if name == "update":
            yield self.after(name, False)
            return
        places = range(self.layers) if again else range(0)
        if name.startswith("forward"):
            yield self.before(name, first)
            yield from (self.block(name, place, again[place]) for place in places)
            released = sum(self.block(name, place, again[place]).released for place in places)
            after = self.after(name, first)
            yield replace(after, delta=after.delta - released)
        else:
            yield self.after(name, first)
            yield from (self.block(name, place, again[place]) for place in reversed(places))
            yield self.before(name, first)


ByPlace = tuple[Piece, list[Piece], Piece]


def _by_phase(traces: tuple[Timeline, Timeline], extra: float, speed: Speed, precision: str) -> dict[str, ByPlace]:
    few, more = traces
    found = {}
    for name in PHASES:
        places: dict[int, Piece] = {}
        for one, other in zip(few.stretches[name], more.stretches[name], strict=True):
            piece = piece_of(one, other, extra, speed, precision)
            places[one.place] = _joined(places[one.place], piece) if one.place in places else piece
        blocks = [places.get(place, Piece()) for place in range(len(few.block_weights))]
        after = places.get(AFTER, Piece())
        if name.startswith("forward"):
            after = replace(after, delta=after.delta + sum(item.released for item in blocks))
        found[name] = (places.get(BEFORE, Piece()), blocks, after)
    return found


def _joined(one: Piece, other: Piece) -> Piece:
    """Return the piece of two stretches of one place, one after the other."""
    later = one.delta + other.peak > one.peak
    return Piece(
        one.delta + other.delta,
        one.delta + other.peak if later else one.peak,
        one.gradients + other.gradients,
        one.gradients + other.gradients_at_peak if later else one.gradients_at_peak,
        one.released + other.released,
        one.seconds + other.seconds,
    )
