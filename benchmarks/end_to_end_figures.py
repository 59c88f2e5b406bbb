"""Figures of `benchmarks.end_to_end`: what its cells say of an arm, of the governor and of the decisions to choose.

A cell is what `end_to_end.run_cell` keeps: pool, kind, seed, the FLOPs of a pass, and by arm and governor ("bm25,
governed") what was spent, the validation curve and the holdout's losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.cells import Losses, mean_loss, paired_interval

CHOOSING = ("bm25", "cascade", "influence")
"""Arms that `lazytrain` may choose instead of chance."""
EQUAL_NATS = 0.01
"""Of a difference that makes choosing and chance alike."""

FoundCell = dict[str, Any]


def to_full(arm: dict[str, Any], full: dict[str, Any], *, amortised: bool = False) -> float | None:
    """Return FLOPs to the lowest validation loss of `full` over those that `full` needed; None where never there."""
    lowest = min(loss for _, loss in full["curve"])
    there = next(flops for flops, loss in full["curve"] if loss <= lowest)
    here = next((flops for flops, loss in arm["curve"] if loss <= lowest), None)
    if here is None:
        return None
    return (here - (arm["choosing_flops"] if amortised else 0)) / there


def geometric(ratios: Iterable[float | None]) -> float | None:
    """Return the geometric mean of those that are there."""
    found = [ratio for ratio in ratios if ratio is not None]
    return round(math.exp(float(np.mean(np.log(found)))), 4) if found else None


def less(pairs: Sequence[tuple[Losses, Losses]]) -> tuple[float, list[float]]:
    """Return first less second, nats a token (or share of answers that are right), and its 95 % interval."""
    point, low, high = paired_interval(pairs)
    return round(point, 4), [round(low, 4), round(high, 4)]


def figures_of(cells: list[FoundCell], arm: str) -> dict[str, Any]:
    """Return the figures of an arm, a governor's name behind it, over the cells of a pool that have it."""
    those = [cell for cell in cells if arm in cell["arms"]]
    found = [cell["arms"][arm] for cell in those]
    name, governor = arm.split(", ")
    chance = [cell["arms"][f"random, {governor}"] for cell in those]
    full = [cell["arms"]["full, fixed"] for cell in those]
    ratios = [to_full(one, other) for one, other in zip(found, full, strict=True)]
    lowest = [min(loss for _, loss in item["curve"]) for item in found]

    def mean(values: Iterable[float]) -> float:
        return round(float(np.mean(list(values))), 4)

    def against(others: Iterable[dict[str, Any]], what: str) -> tuple[float, list[float]]:
        return less([(one[what], other[what]) for one, other in zip(found, others, strict=True)])

    nats, interval = against(chance, "losses")
    figures: dict[str, Any] = {
        "cells": len(those),
        "loss": mean(mean_loss(item["losses"]) for item in found),
        "nats_vs_random": nats,
        "nats_vs_random_interval": interval,
    }
    fixed = [cell["arms"].get(f"{name}, fixed") for cell in those]
    if governor == "governed" and all(fixed):
        figures["nats_vs_fixed"], figures["nats_vs_fixed_interval"] = against(fixed, "losses")
    if all("answers" in item for item in (*found, *chance)):
        figures["accuracy"] = mean(mean_loss(item["answers"]) for item in found)
        figures["accuracy_vs_random"], figures["accuracy_vs_random_interval"] = against(chance, "answers")
    return {
        **figures,
        "flops_to_full_loss_ratio": geometric(ratios),
        "reached_full_loss": sum(ratio is not None for ratio in ratios),
        "amortised": geometric(to_full(one, other, amortised=True) for one, other in zip(found, full, strict=True)),
        "optimism": mean(mean_loss(item["losses"]) - least for item, least in zip(found, lowest, strict=True)),
        "passes": mean(item["flops"] / cell["pass_flops"] for item, cell in zip(found, those, strict=True)),
        "tuned": mean(item["tuned_flops"] / cell["pass_flops"] for item, cell in zip(found, those, strict=True)),
        "seconds": mean(item["seconds"] for item in found),
    }


def decided(cells: list[FoundCell], budget: float) -> dict[str, Any]:
    """Return how good the decisions of `lazytrain` to choose or to decline were; `budget` in passes.

    Cells without the arms that tell what choosing would have brought say nothing of whether it was right.
    """
    right, declined = [], []
    for cell in cells:
        arms, mine = cell["arms"], cell["arms"]["lazytrain, governed"]
        tried = [arms[f"{name}, fixed"] for name in CHOOSING if f"{name}, fixed" in arms]
        if tried:
            gain = mean_loss(arms["random, fixed"]["losses"]) - min(mean_loss(item["losses"]) for item in tried)
            right.append(abs(gain) < EQUAL_NATS or mine["chose"] == (gain > 0))
        if not mine["chose"]:
            declined.append(mine["choosing_flops"] / (budget * cell["pass_flops"]))
    mine, oracle = (
        [to_full(cell["arms"][f"{name}, governed"], cell["arms"]["full, fixed"]) for cell in cells]
        if all(f"{name}, governed" in cell["arms"] for cell in cells)
        else []
        for name in ("lazytrain", "oracle")
    )
    savings = [
        (1 - one) / (1 - best)
        for one, best in zip(mine, oracle, strict=False)
        if one is not None and best is not None and best < 1
    ]
    return {
        "decisions_right": [sum(right), len(right)],
        "declined": len(declined),
        "declining_cost": round(max(declined), 4) if declined else None,
        "saving_of_oracle": round(float(np.mean(savings)), 4) if savings else None,
    }


def table_of(figures: dict[str, dict[str, Any]], title: str) -> Table:
    """Return the figures of a pool for people, an arm a row."""
    columns = list(dict.fromkeys(name for found in figures.values() for name in found))
    table = Table("arm", *columns, title=title)
    for arm, found in figures.items():
        table.add_row(arm, *(str(found.get(name, "")) for name in columns))
    return table
