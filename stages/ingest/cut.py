"""Cutting validation and holdout from the target where they are not given.

Units are cut whole: a task where tasks are known, else a question with all rows that ask it, so no two splits share
one. Units are ordered by a seeded hash of their content, never by their place in a file, and each split takes its share
of the rows from the front. Holds 16 bytes and a count for each unit of the target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from data_contracts.errors import InputError


def cut(units: Mapping[bytes, int], shares: Mapping[str, float], seed: int, what: str) -> dict[bytes, str]:
    """Return the split of each unit: one of `shares`, or "target" for the rest.

    Args:
        units: rows of each unit.
        shares: share of the rows that each split to be cut should get, in order; may be empty.
        seed: decides the order of units.
        what: what a unit is, in the plural, for the error: "tasks" or "questions".

    Every split gets at least one unit and as many rows as come nearest to its share. Raises `InputError` where there
    are fewer units than splits.
    """
    needed = len(shares) + 1
    if len(units) < needed:
        raise InputError(
            f"the target holds at least {needed} usable {what}, to cut {' and '.join(shares)} from it",
            f"it holds {len(units)}",
            f"add rows to the target, or give data.{' and data.'.join(shares)} themselves",
        )
    order = sorted(units, key=lambda unit: hashlib.sha256(b"%d:%b" % (seed, unit)).digest())
    total = sum(units.values())
    placed: dict[bytes, str] = {}
    at = 0
    for number, (split, share) in enumerate(shares.items()):
        rows, left_for_others = 0, len(shares) - number
        while at < len(order) - left_for_others:
            size = units[order[at]]
            if rows and rows + size / 2 > share * total:
                break
            placed[order[at]] = split
            rows += size
            at += 1
    return {unit: placed.get(unit, "target") for unit in units}
