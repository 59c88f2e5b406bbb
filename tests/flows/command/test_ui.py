"""`lazytrain ui` serves both pages on loopback, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest

from data_contracts.errors import ConfigError
from flows.command import ui
from flows.workspace import Workspace
from tests.command import ROOT, lazytrain
from tests.infra.services import free_port

CONFIG = "model: {path: m}\ndata: {pool: p.jsonl, target: t.jsonl}\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "lazytrain.yaml").write_text(CONFIG)
    return tmp_path


def test_a_taken_port_is_refused_with_the_option_that_changes_it(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = lazytrain(
            "ui", "--mlflow-port", str(taken.getsockname()[1]), "--prefect-port", str(free_port()), cwd=folder
        )
    assert done.returncode == 2
    assert "--mlflow-port" in done.stderr


def test_where_the_program_of_mlflow_is_missing_nothing_is_started_and_the_error_says_so(folder, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ConfigError, match="in neither"):
        ui.mlflow_command(Workspace.read(folder / "lazytrain.yaml"), 5000)


def test_both_servers_listen_on_loopback_only(folder):
    workspace = Workspace.read(folder / "lazytrain.yaml")
    for command in (ui.prefect_command(4200), ui.mlflow_command(workspace, 5000)):
        assert command[command.index("--host") + 1] == "127.0.0.1"


@pytest.mark.slow
def test_both_pages_answer_and_end_with_the_command(folder):
    ports = free_port(), free_port()
    arguments = ["ui", "--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1])]
    child = subprocess.Popen(
        [sys.executable, "-m", "flows.command.app", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        lines = []
        for line in child.stdout:
            lines.append(line)
            if "ctrl-C" in line:
                break
        assert "ctrl-C" in lines[-1], lines
        for page in (f"http://127.0.0.1:{ports[0]}/api/health", f"http://127.0.0.1:{ports[1]}/health"):
            assert urllib.request.urlopen(page, timeout=30).status == 200
        below = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 0
        until = time.monotonic() + 20
        while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in below):
            assert time.monotonic() < until, below
            time.sleep(0.2)
    finally:
        if child.poll() is None:
            child.kill()
