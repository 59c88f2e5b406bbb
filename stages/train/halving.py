"""What training does where memory runs out in a step: half as many rows a micro-batch, as many examples a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from data_contracts.errors import BudgetError
from stages.technique.attempt import ShortOfMemoryError, generators, restore
from stages.train.position import Position
from stages.train.windows import Windows

T = TypeVar("T")


def within_memory(
    attempt: Callable[[Windows], T], windows: Windows, at: Position, run_step: int, device: str
) -> tuple[Windows, T]:
    """Return the windows as they are from now on, and what `attempt` made of a step.

    Where memory runs out before an update, the step is made again from the same generator states with `halved` windows;
    see there for the arguments and what is raised.
    """
    states = generators(torch.device(device))
    while True:
        try:
            return windows, attempt(windows)
        except ShortOfMemoryError as error:
            found = str(error)
        windows = halved(windows, at, run_step, found)
        restore(states)


def halved(windows: Windows, at: Position, run_step: int, found: str) -> Windows:
    """Return `windows` in micro-batches of half as many rows, and note it in `at`.

    Args:
        windows: as they were when memory ran out.
        at: the segment's position, before the step that is made again.
        run_step: steps of the run before the segment.
        found: the error's words.

    Raises `BudgetError` where a micro-batch holds one row, or must hold the whole window because updates are made
    inside its backward pass.
    """
    rows = windows.plan.micro_batch
    if rows == 1 or windows.plan.update_in_backward:
        raise BudgetError(
            "a step fits the memory that this process may have",
            f"memory ran out with micro-batches of {rows} row(s), which cannot be made smaller: {found[:300]}",
            "set `budget.peak_bytes` to what there is and plan again, or give the process more",
        )
    at.micro_batch = rows // 2
    at.halved.append(run_step + at.step + 1)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return cut(windows, at.micro_batch)


def cut(windows: Windows, rows: int) -> Windows:
    """Return `windows` in micro-batches of `rows` rows."""
    return replace(windows, plan=windows.plan.model_copy(update={"micro_batch": rows}))
