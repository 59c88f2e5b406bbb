"""Statuses made true again: runs whose process ended without closing them.

MLflow leaves a run RUNNING when its process is killed. Nothing is closed on a guess: a process of this host is looked
up, one of another host must stay silent while it is watched, and one that had committed counts as finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from data_contracts.store.attempts import IDENTITY, MANIFEST, PROCESS, SHARED, STAGE, Attempts
from data_contracts.store.heartbeat import HEARTBEAT
from data_contracts.store.lease import KIND, State
from data_contracts.store.process import Process, this_process
from data_contracts.store.tracking import Tracking

SILENCE_SECONDS = 60.0


def close_lost(
    tracking: Tracking, attempts: Attempts, watch_seconds: float | None, committed: Callable[[str, str, str], bool]
) -> list[str]:
    """Close runs whose process ended without closing them, and return their ids.

    A process of this host is looked up; one of another host is closed after its heartbeat, already old, was not
    seen to change for `watch_seconds` of this process's clock (None leaves those alone). One that ended after its
    commit (asked of `committed(stage, identity, run)`) is FINISHED.
    """
    running = list(attempts.search("attributes.status = 'RUNNING'"))
    closed, doubtful = [], []
    for item in running:
        text = item.data.tags.get(PROCESS)
        if text is None:
            continue
        process = Process.model_validate_json(text)
        if process.gone():
            _close_lost(attempts, item, f"process {process.pid} on {process.host} ended without a word", committed)
            closed.append(item.info.run_id)
        elif watch_seconds is not None and not _here(process) and _age(item) > SILENCE_SECONDS:
            doubtful.append((item, process))
    if doubtful and watch_seconds is not None:
        time.sleep(watch_seconds)
    for item, process in doubtful:
        run = item.info.run_id
        now = tracking.do(lambda client, run=run: client.get_run(run))  # type: ignore[misc]
        if now.info.status == "RUNNING" and now.data.tags.get(HEARTBEAT) == item.data.tags.get(HEARTBEAT):
            _close_lost(attempts, now, f"no sign of life from process {process.pid} on {process.host}", committed)
            closed.append(run)
    return closed


def close_superseded(attempts: Attempts, state: State, reason: str) -> None:
    """Close attempts of an identity that another claim took over: FINISHED where they had committed, else FAILED."""
    done = {commit.run for commit in state.commits}
    for run in state.attempts:
        if attempts.get(run).info.status == "RUNNING":
            attempts.close(run, *(("FINISHED", "") if run in done else ("FAILED", reason)))


def _here(process: Process) -> bool:
    return process.place == this_process().place


def _close_lost(attempts: Attempts, item: Any, reason: str, committed: Callable[[str, str, str], bool]) -> None:
    tags, run = item.data.tags, item.info.run_id
    if tags.get(SHARED) == "True":
        done = committed(tags[STAGE], tags[IDENTITY], run)
    else:
        done = tags.get(KIND) == "attempt" and MANIFEST in item.data.params
    attempts.close(run, *(("FINISHED", "") if done else ("FAILED", reason)))


def _age(item: Any) -> float:
    return time.time() - float(item.data.tags.get(HEARTBEAT, item.info.start_time / 1000))
