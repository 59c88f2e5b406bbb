"""One option for each block, the least risk in sum within a sum of bytes: a knapsack with choices, solved exactly.

Dynamic programming over the blocks; a state is (bytes, risk) so far, and one that another beats in both is dropped. Of
alike blocks there are few different sums of bytes, so states stay few.
"""

from __future__ import annotations

from collections.abc import Sequence

Option = tuple[int, float]
"""Bytes, risk."""


def assign(blocks: Sequence[Sequence[Option]], budget: int) -> tuple[int, ...] | None:
    """Return the place of each block's option so that their risks add up to the least within `budget` bytes.

    Of equal risk the one of fewer bytes, then of earlier options. None where even the smallest do not fit.
    """
    least = [min(size for size, _ in options) for options in blocks]
    rest = [sum(least[place + 1 :]) for place in range(len(blocks))]
    states: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    for options, later in zip(blocks, rest, strict=True):
        found = [
            (risk + more, size + bytes_, (*chosen, place))
            for risk, size, chosen in states
            for place, (bytes_, more) in enumerate(options)
            if size + bytes_ + later <= budget
        ]
        states, smallest = [], None
        for state in sorted(found):
            if smallest is None or state[1] < smallest:
                states.append(state)
                smallest = state[1]
    return min(states)[2] if states else None
