"""A flow that a worker runs and a test kills: it signs as ours do, then waits where it is told to,
in a round of its own where that is asked for."""

from __future__ import annotations

import atexit
import time
from functools import partial
from pathlib import Path

from prefect import flow, task

from flows.labels import sign
from flows.rounds import as_subflow


@task
def work(seconds: float, begun: str) -> None:
    """Work for a while, as a task run inside; `begun` is made when it begins."""
    if begun:
        Path(begun).touch()
    time.sleep(seconds)


@flow(name="pipeline")
def pipeline(
    seconds: float = 0.0, after: float = 0.0, mark: str = "", begun: str = "", in_a_round: bool = False
) -> int:
    """Work for `seconds`, and take `after` more to exit once it has succeeded; `mark` is made when the exit begins."""
    sign()
    if after:
        atexit.register(_leave, after, mark)
    worked = partial(work, seconds, begun)
    as_subflow(1, worked) if in_a_round else worked()
    return 1


def _leave(seconds: float, mark: str) -> None:
    Path(mark).touch()
    time.sleep(seconds)
