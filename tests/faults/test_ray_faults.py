"""Faults 9 and 17: a worker that dies is not tried again behind our back, and a dead driver leaves no cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from data_contracts.records import OUTSIDE_FILE, Result
from data_contracts.store import Store
from tests.conftest import ROOT
from tests.stages.test_runner import make, statuses
from tests.stores import blank

GONE_SECONDS = 120.0
"""Ray's own processes and workers end within seconds of their driver, its agents after a minute."""


def start(request: Path, out: Path) -> subprocess.Popen[bytes]:
    with out.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.faults.ray_toy", str(request)],
            cwd=ROOT,
            stdout=stream,
            stderr=(out.with_suffix(".err")).open("wb"),
        )


def wait_for(log: Path, executions: int, driver: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 240
    while not log.exists() or len(log.read_text().splitlines()) < executions:
        assert driver.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_09_17_one_of_two_workers_killed_and_a_killed_driver(tmp_path: Path) -> None:
    """One commit, an attempt for each execution, and nothing of the dead driver's cluster left."""
    address, log, go = blank(tmp_path), tmp_path / "log", tmp_path / "go"
    path = tmp_path / "request.json"
    path.write_text(make(address, knobs={"log": str(log), "go": str(go)}).model_dump_json())

    driver = start(path, tmp_path / "first")
    wait_for(log, 1, driver)
    workers = [
        process
        for process in psutil.Process(driver.pid).children(recursive=True)
        if "RayTrainWorker" in " ".join(process.cmdline())
    ]
    assert len(workers) == 2
    workers[1].kill()
    assert driver.wait(240) == 3, "worth trying again, by whoever started it"
    assert b"TransientError" in (tmp_path / "first.err").read_bytes()
    assert log.read_text().splitlines() == ["executed"], "Ray did not try again by itself"
    assert statuses(address) == ["FAILED"]

    driver = start(path, tmp_path / "second")
    wait_for(log, 2, driver)
    cluster = psutil.Process(driver.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in cluster)
    (note,) = Path(address.work_uri).glob(f"*/claim-*/scratch/{OUTSIDE_FILE}")
    folder = Path(note.read_text())
    assert folder.is_dir()
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    killed = time.monotonic()

    go.touch()
    driver = start(path, tmp_path / "third")
    assert driver.wait(240) == 0, (tmp_path / "third.err").read_text()[-3000:]
    result = Result.model_validate_json((tmp_path / "third").read_text())
    assert not folder.exists(), "the next attempt removes the dead one's temporary folder"
    assert log.read_text().splitlines() == ["executed"] * 3
    assert statuses(address) == ["FINISHED", "FAILED", "FAILED"]
    state = Store(address)._coordination.state("select", result.identity)
    assert [commit.run for commit in state.commits] == [result.run]
    _, alive = psutil.wait_procs(cluster, timeout=max(0.0, killed + GONE_SECONDS - time.monotonic()))
    assert not alive
