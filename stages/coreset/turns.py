"""Groups of rows served in turns: an order every prefix of which divides the groups as asked.

A selector orders each group's rows for itself; here they become one order, from which a quota of rows or of tokens
takes a prefix. Imports no torch.
Equal shares: a row of each group in turn, until it has none. That is the budget of S2L and of CCS, groups ascending by
size, each ⌊what is left / groups left⌋. Shares by weight: the divisor method of Sainte-Laguë, which
rounds to the nearest, never takes a row away when the quota grows, and hands on what an exhausted group cannot use.
Shapes: B rows, G groups.
"""

from __future__ import annotations

import numpy as np


def in_turns(group_B: np.ndarray, weight_G: np.ndarray | None = None) -> np.ndarray:
    """Return the positions 0 to B − 1 in the order served; rows of a group keep the order they are given in.

    Args:
        group_B: the group of each row, int64 from 0.
        weight_G: at least 0, the share of each group; equal where None. A group of weight 0 comes when the others end.

    Ties go to the larger group, then to the first.
    """
    size_G = np.bincount(group_B, minlength=0 if weight_G is None else len(weight_G))
    by_group = np.argsort(group_B, kind="stable")
    turn_B = np.empty(len(group_B), dtype=np.int64)
    turn_B[by_group] = np.arange(len(group_B)) - np.repeat(size_G.cumsum() - size_G, size_G)
    weight_B = np.ones(len(group_B)) if weight_G is None else np.asarray(weight_G, dtype=np.float64)[group_B]
    with np.errstate(divide="ignore"):
        due_B = (turn_B + 0.5) / weight_B
    return np.lexsort((group_B, -size_G[group_B], turn_B, due_B))
