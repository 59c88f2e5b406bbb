"""The choice of recomputed blocks against all 2^n choices, each walked through by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stages.plan.checkpointing import choose_blocks, least_blocks
from stages.plan.pieces import Piece, Pieces

PASSES = (("forward", "backward"), ("forward again", "backward again"))


def random_pieces(seed: int, layers: int, *, alike: bool = False) -> Pieces:
    """Made-up pieces: what a block leaves, brings back, gives up after the last block, and its gradients."""
    draw = np.random.default_rng(seed)
    first = [
        {"kept": int(draw.integers(20, 60)), "input": int(draw.integers(2, 15)), "cache": int(draw.integers(0, 8)),
         "peak": int(draw.integers(0, 30)), "gradient": int(draw.integers(0, 12)), "time": int(draw.integers(1, 9))}
        for _ in range(layers)
    ]  # fmt: skip
    blocks = [first[0]] * layers if alike else first
    head = [int(value) for value in draw.integers(0, 60, 4)]
    pieces = Pieces.__new__(Pieces)
    pieces.layers, pieces.start, pieces._found = layers, 3, {False: {}, True: {}}
    for again in (False, True):
        for number, (forward, backward) in enumerate(PASSES):
            f, b = [], []
            for one in blocks:
                left = one["input"] + one["cache"] if again else one["kept"]
                gradient = 0 if number else one["gradient"]
                back = one["kept"] - one["input"] if again else 0
                released = one["cache"] if again else 0
                f.append(Piece(left, left + one["peak"], 0, 0, released, one["time"]))
                delta = gradient - (left - released)
                b.append(Piece(delta, back + one["peak"], gradient, 0, 0, one["time"] * (3 if again else 2)))
            tail = Piece(head[0] + (5 if again else 0), head[1])
            pieces._found[again][forward] = (Piece(head[2], head[2]), f, tail)
            pieces._found[again][backward] = (Piece(-head[2]), b, Piece(-head[0] - (5 if again else 0), head[3]))
        pieces._found[again]["update"] = (Piece(), [], Piece(0, 4))
    return pieces


def by_hand(pieces: Pieces, chosen: tuple[bool, ...], micro_batches: int) -> tuple[int, int]:
    """Return (peak, time) of a choice, adding one piece after the other."""
    level = peak = pieces.start
    time = 0.0
    for number, (forward, backward) in enumerate(PASSES[: min(2, micro_batches)]):
        often = micro_batches - 1 if number else 1
        steps = []
        before, _, after = pieces._found[chosen[0]][forward]
        steps.append((before.delta, before.peak, 0))
        given_up = 0
        for place, again in enumerate(chosen):
            block = pieces._found[again][forward][1][place]
            steps.append((block.delta, block.peak, block.seconds))
            given_up += block.released
        steps.append((after.delta - given_up, after.peak, 0))
        before, _, after = pieces._found[chosen[0]][backward]
        steps.append((after.delta, after.peak, 0))
        for place in reversed(range(len(chosen))):
            block = pieces._found[chosen[place]][backward][1][place]
            steps.append((block.delta, block.peak, block.seconds))
        steps.append((before.delta, before.peak, 0))
        for delta, most, seconds in steps:
            peak, level, time = max(peak, level + most), level + delta, time + often * seconds
    return max(peak, level + 4), round(time)


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("alike", [False, True])
def test_no_choice_of_blocks_that_fits_takes_less_time(alike: bool, micro_batches: int) -> None:
    for seed in range(12):
        pieces = random_pieces(seed, 6, alike=alike)
        every = {
            choice: by_hand(pieces, choice, micro_batches) for choice in itertools.product((False, True), repeat=6)
        }
        peaks = sorted({peak for peak, _ in every.values()})
        for allowed in (peaks[0] - 1, peaks[0], peaks[len(peaks) // 3], peaks[-1] - 1, peaks[-1]):
            fitting = [time for peak, time in every.values() if peak <= allowed]
            found = choose_blocks(pieces, micro_batches, allowed)
            assert (found is None) == (not fitting)
            if found is not None:
                peak, time = every[found]
                assert peak <= allowed
                assert time == min(fitting)
        assert every[least_blocks(pieces, micro_batches)][0] == peaks[0]


def test_with_like_blocks_the_first_ones_are_recomputed_and_the_least_budget_is_found_to_the_byte() -> None:
    """The later a block, the more of the others is still held when its activations come back."""
    pieces = random_pieces(3, 24, alike=True)
    for allowed in range(by_hand(pieces, (False,) * 24, 2)[0], 0, -17):
        found = choose_blocks(pieces, 2, allowed)
        if found is None:
            break
        assert found[1:] == tuple(sorted(found[1:], reverse=True))  # the first also decides what stands before it
    least = by_hand(pieces, least_blocks(pieces, 2), 2)[0]
    assert choose_blocks(pieces, 2, least) is not None
    assert choose_blocks(pieces, 2, least - 1) is None


def test_many_unlike_blocks_are_chosen_safely_though_bytes_are_rounded() -> None:
    pieces = random_pieces(5, 40)
    none, every = (by_hand(pieces, (again,) * 40, 2)[0] for again in (False, True))
    for share in (0.2, 0.5, 0.8):
        allowed = int(every + share * (none - every))
        found = choose_blocks(pieces, 2, allowed)
        assert found is not None
        assert by_hand(pieces, found, 2)[0] <= allowed
