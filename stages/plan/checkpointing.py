"""Which blocks to recompute: the fewest seconds that keep every moment of a step within the memory allowed.

A knapsack over a stack: going forward, each block leaves its activations or its input alone; going backward, a
recomputed block brings its activations back while what lies below it is still held. So a choice must fit at every
block, not in sum: recomputing the last block saves nothing where the backward pass is dearest there. Solved exactly by
dynamic programming over the blocks; a state is (bytes left by the blocks so far, seconds), and one that another beats
in all is dropped, since every limit only bounds bytes from above. With like blocks there are at most as many states as
blocks. Source of the problem: Chen et al. 2016 (arXiv 1604.06174), section 4; Beaumont et al. 2019 for chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.plan.pieces import PASSES, Pieces

MOST_STATES = 4096
"""With more, bytes are rounded up to `ROUND` of the memory allowed: still safe, no longer exact."""
ROUND = 2**-14


@dataclass(frozen=True)
class Option:
    """A block's part if it keeps its activations, or if it is recomputed.

    Attributes:
        time: of its passes, all micro-batches, picoseconds (whole numbers add up alike in any order).
        forward: bytes it leaves after its forward pass, until the last block's.
        backward: bytes it leaves until its backward pass.
        forward_peaks, backward_peaks: most above where it began, by pass.
    """

    time: int
    forward: int
    backward: int
    forward_peaks: tuple[int, ...]
    backward_peaks: tuple[int, ...]


@dataclass(frozen=True)
class Room:
    """What the rest of a pass leaves to the blocks: bytes that may not be exceeded, counted from the first block.

    Attributes:
        forward: for what is held inside any block's forward pass.
        end: for what all blocks leave, forward, at the output head.
        turn: for what all blocks leave, backward, at the output head's backward pass.
        backward: for what is held inside block i's backward pass, gradients of later blocks accounted for; by block.
    """

    forward: int
    end: int
    turn: int
    backward: tuple[int, ...]


State = tuple[int, int, int, tuple[bool, ...]]
"""Bytes left forward and backward, time, which blocks are recomputed."""


def cheapest(blocks: Sequence[tuple[Option, Option]], rooms: Sequence[Room]) -> tuple[bool, ...] | None:
    """Return which blocks to recompute so that the step fits in the least time; None where no choice fits.

    Args:
        blocks: each block's options: kept, recomputed.
        rooms: of each pass.

    Of equally fast choices the one that holds less, then the one that recomputes earlier blocks.
    """
    states: list[State] = [(0, 0, 0, ())]
    grain = 0
    for place, options in enumerate(blocks):
        found = []
        for forward, backward, time, chosen in states:
            for again, option in enumerate(options):
                left = forward + option.forward, backward + option.backward
                if all(
                    forward + option.forward_peaks[at] <= room.forward
                    and left[1] + option.backward_peaks[at] <= room.backward[place]
                    for at, room in enumerate(rooms)
                ):
                    found.append((*left, time + option.time, (*chosen, bool(again))))
        states = _undominated(found)
        if len(states) > MOST_STATES:
            grain = grain or max(1, round(ROUND * max(room.forward for room in rooms)))
            states = _undominated([(_up(a, grain), _up(b, grain), time, chosen) for a, b, time, chosen in states])
    ending = [
        (time, backward, tuple(not again for again in chosen))
        for forward, backward, time, chosen in states
        if all(forward <= room.end and backward <= room.turn for room in rooms)
    ]
    return tuple(not kept for kept in min(ending)[2]) if ending else None


def _up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def _undominated(states: list[State]) -> list[State]:
    kept: list[State] = []
    for state in sorted(states, key=lambda item: (item[0], item[1], item[2], tuple(not again for again in item[3]))):
        if not any(other[1] <= state[1] and other[2] <= state[2] for other in kept):
            kept.append(state)
    return kept


def choose_blocks(pieces: Pieces, micro_batches: int, allowed: int) -> tuple[bool, ...] | None:
    """Return which blocks to recompute so that what a step holds beyond weights and moments stays within `allowed`.

    `micro_batches` is how many a step has. None where no choice fits. The first block's choice also decides what stands
    before and after the blocks (a frozen embedding's output is held by the first block alone), so both are tried.
    """
    best: tuple[float, int, tuple[bool, ...]] | None = None
    for first in (False, True):
        chosen = _choose(pieces, first, micro_batches, allowed)
        if chosen is None:
            continue
        held, seconds = pieces.walk(chosen, micro_batches)
        peak = max(item.peak for item in held.values())
        if peak <= allowed:
            found = (sum(seconds.values()), peak, chosen)
            best = found if best is None else min(best, found)
    return best[2] if best else None


def least_blocks(pieces: Pieces, micro_batches: int) -> tuple[bool, ...]:
    """Return the choice of recomputed blocks with the lowest peak of all; of several the fastest."""
    best = (False,) * pieces.layers
    low, high = -1, _peak(pieces, best, micro_batches)  # nothing fits `low`; `best` fits `high`
    while high - low > 1:
        chosen = choose_blocks(pieces, micro_batches, (low + high) // 2)
        if chosen is None:
            low = (low + high) // 2
        else:
            best, high = chosen, _peak(pieces, chosen, micro_batches)
    return best


def _peak(pieces: Pieces, chosen: tuple[bool, ...], micro_batches: int) -> int:
    held, _ = pieces.walk(chosen, micro_batches)
    return max(item.peak for item in held.values())


def _choose(pieces: Pieces, first: bool, micro_batches: int, allowed: int) -> tuple[bool, ...] | None:
    layers, passes = pieces.layers, PASSES[: min(2, micro_batches)]
    if not layers:
        return None
    often = (1, micro_batches - 1)
    blocks = []
    for place in range(layers):
        options = []
        for again in (False, True):
            pairs = [(pieces.block(f, place, again), pieces.block(b, place, again)) for f, b in passes]
            options.append(
                Option(
                    round(1e12 * sum(n * (f.seconds + b.seconds) for n, (f, b) in zip(often, pairs, strict=False))),
                    pairs[0][0].delta,
                    pairs[0][0].delta - pairs[0][0].released,
                    tuple(f.peak for f, _ in pairs),
                    tuple(b.peak for _, b in pairs),
                )
            )
        blocks.append((options[first], options[first]) if place == 0 else (options[0], options[1]))
    rooms, level = [], pieces.start
    for forward, backward in passes:
        base = level + pieces.before(forward, first).delta
        after, turn = pieces.after(forward, first), pieces.after(backward, first)
        level = base + after.delta + turn.delta
        room_B = []
        for place in reversed(range(layers)):
            again = first if place == 0 else False
            f, b = pieces.block(forward, place, again), pieces.block(backward, place, again)
            room_B.append(allowed - level)
            level += f.delta - f.released + b.delta  # its gradients: the same whatever was chosen
        rooms.append(
            Room(
                forward=allowed - base,
                end=allowed - base - after.peak,
                turn=allowed - base - after.delta - turn.peak,
                backward=tuple(reversed(room_B)),
            )
        )
        level += pieces.before(backward, first).delta
    chosen = cheapest(blocks, rooms)
    return None if chosen is None else (first, *chosen[1:])
