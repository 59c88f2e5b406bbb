"""A command that is killed leaves a server and a run that seem to live: the next command ends both, and nothing else."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from flows.orphans import STARTED_BY, end_orphans
from tests.conftest import ROOT
from tests.infra.services import plain_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STARTS = """
import sys
from pathlib import Path
from flows.environment import prepare
prepare(Path(sys.argv[1]))
from tests.faults.slow_flows import pipeline
pipeline(seconds=600, begun=sys.argv[2], in_a_round=True)
"""
NEXT = """
import sys
from pathlib import Path
from flows.environment import prepare
prepare(Path(sys.argv[1]))
from prefect.client.orchestration import get_client
from flows.reconcile import reconcile
with get_client(sync_client=True) as client:
    closed = reconcile()
    runs = client.read_flow_runs()
    assert sorted(closed) == sorted(str(run.id) for run in runs), closed
    print([run.state.type.value for run in (*runs, *client.read_task_runs())])
    assert reconcile() == []
"""


def command_with_a_server(home: Path) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """Start what `lazytrain run` starts, a flow on an embedded server under `home`; return the command and the server."""
    begun = home.parent / "begun"
    command = subprocess.Popen([sys.executable, "-c", STARTS, str(home), str(begun)], env=plain_environment(), cwd=ROOT)
    until = time.monotonic() + 120
    while not begun.exists():
        assert command.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    while not recorded(home / "prefect" / "prefect.db"):  # a task run reaches the database some time after it began
        assert time.monotonic() < until
        time.sleep(0.1)
    (server,) = psutil.Process(command.pid).children()
    return command, server


def recorded(database: Path) -> bool:
    """Return whether Prefect's database holds both task runs as running: the round's in the pipeline, the work's in it."""
    with closing(sqlite3.connect(database, timeout=30)) as link:
        return link.execute("SELECT count(*) FROM task_run WHERE state_type = 'RUNNING'").fetchone() == (2,)


def ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, though whoever inherited it may not have asked how."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_the_server_of_a_killed_command_is_ended_by_the_next_one_and_a_living_one_is_left_alone(tmp_path: Path) -> None:
    command, server = command_with_a_server(tmp_path / "one")
    place = tmp_path / "one" / "prefect"
    try:
        assert end_orphans(place) == [], "its command lives"
        os.kill(command.pid, signal.SIGKILL)
        command.wait()
        assert server.is_running(), "the complaint: nothing ended it"
        assert end_orphans(tmp_path / "other") == [], "another folder's servers are not ours to end"
        assert end_orphans(place) == [server.pid]
        assert ended(server)
        assert end_orphans(place) == []
        done = subprocess.run(
            [sys.executable, "-c", NEXT, str(tmp_path / "one")],
            env=plain_environment(), cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(["CRASHED"] * 4), "pipeline and round, and a task run inside each"
    finally:
        for left in (command.pid, server.pid):
            if psutil.pid_exists(left):
                os.kill(left, signal.SIGKILL)


def test_a_process_that_serves_nothing_is_never_ended(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    started = psutil.Process(gone.pid).create_time()
    gone.wait()
    from data_contracts.store.process import this_process

    starter = this_process().model_copy(update={"pid": gone.pid, "started": started})
    environment = {**os.environ, STARTED_BY: starter.model_dump_json(), "PREFECT_HOME": str(tmp_path)}
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
    try:
        assert starter.gone()
        assert end_orphans(tmp_path) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
