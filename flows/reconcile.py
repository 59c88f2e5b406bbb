"""Flow runs made true again: those whose process is gone are closed as crashed, with the task runs inside them.

Nothing is closed on a guess. A run of this host is closed when the process that signed it has ended; one that a worker
claimed and never started when no worker of its pool is left, or after the longest time that a start may take. A run of
another host is the automations' business (`automations.py`). Closing a run gives its concurrency slot back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from flows.automations import START_SECONDS
from flows.labels import signed
from stages.stage import VERBS

OURS = ("pipeline", "round", *VERBS)
_PAGE = 200
UNSIGNED_SECONDS = 60.0
"""A run signs as the first thing it does."""
ABANDONED_SECONDS = 30.0
"""A claimed run whose pool has no living worker: its last worker may have handed it to its process just before."""


def reconcile() -> list[str]:
    """Close the flow runs whose process is gone, and return their ids; the server is the one Prefect is set to."""
    closed = []
    with get_client(sync_client=True) as client:
        for run in list(_open_runs(client)):
            reason = _lost(client, run)
            if reason:
                _close(client, run, reason)
                closed.append(str(run.id))
    return closed


def _open_runs(client: SyncPrefectClient) -> Iterator[FlowRun]:
    ours = FlowFilter.model_validate({"name": {"any_": list(OURS)}})
    states = FlowRunFilter.model_validate({"state": {"type": {"any_": ["PENDING", "RUNNING"]}}})
    offset = 0
    while page := client.read_flow_runs(flow_filter=ours, flow_run_filter=states, limit=_PAGE, offset=offset):
        yield from page
        offset += len(page)


def _lost(client: SyncPrefectClient, run: FlowRun) -> str:
    """Return why `run` is certain to have lost its process; empty where that is not certain."""
    process = signed(run)
    if process is not None:
        return f"process {process.pid} on {process.host} ended without a word" if process.gone() else ""
    if run.state is None:
        return ""
    waited = time.time() - run.state.timestamp.timestamp()
    if run.state.type != StateType.PENDING:
        return "its process ended before it could say which it was" if waited > UNSIGNED_SECONDS else ""
    if waited > START_SECONDS:
        return f"a worker claimed it {waited:.0f} s ago and did not start it"
    if waited > ABANDONED_SECONDS and run.work_pool_name and not _alive(client, run.work_pool_name):
        return f"a worker claimed it, and no worker of the pool {run.work_pool_name} is left"
    return ""


def _alive(client: SyncPrefectClient, pool: str) -> bool:
    try:
        workers = client.read_workers_for_work_pool(pool)
    except ObjectNotFound:
        return False
    return any(worker.status == WorkerStatus.ONLINE for worker in workers)


def _close(client: SyncPrefectClient, run: FlowRun, reason: str) -> None:
    state: Any = Crashed(message=f"{reason}; run it again: it goes on from what was committed")
    inside = FlowRunFilter.model_validate({"id": {"any_": [run.id]}})
    unfinished = TaskRunFilter.model_validate({"state": {"type": {"any_": ["PENDING", "RUNNING"]}}})
    for task_run in client.read_task_runs(flow_run_filter=inside, task_run_filter=unfinished):
        client.set_task_run_state(task_run.id, state, force=True)
    client.set_flow_run_state(run.id, state)
