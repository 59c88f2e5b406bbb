"""A flow that a worker runs and a test kills: it signs as ours do, then waits where it is told to."""

from __future__ import annotations

import atexit
import time
from pathlib import Path

from prefect import flow, task

from flows.labels import sign


@task
def work(seconds: float, begun: str) -> None:
    """Work for a while, as a task run inside; `begun` is made when it begins."""
    if begun:
        Path(begun).touch()
    time.sleep(seconds)


@flow(name="pipeline")
def pipeline(seconds: float = 0.0, after: float = 0.0, mark: str = "", begun: str = "") -> int:
    """Work for `seconds`, and take `after` more to exit once it has succeeded; `mark` is made when the exit begins."""
    sign()
    if after:
        atexit.register(_leave, after, mark)
    work(seconds, begun)
    return 1


def _leave(seconds: float, mark: str) -> None:
    Path(mark).touch()
    time.sleep(seconds)
