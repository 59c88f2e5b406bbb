"""Nothing that a run on one machine starts can be reached from another machine."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.workers.train import run_workers
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def listening(pid: int) -> dict[str, list[str]]:
    """Return the addresses on which a process and all below it listen, by the program's name."""
    parent = psutil.Process(pid)
    found: dict[str, list[str]] = {}
    for process in (parent, *parent.children(recursive=True)):
        try:
            for item in process.net_connections("inet"):
                if item.status == psutil.CONN_LISTEN:
                    found.setdefault(process.name(), []).append(item.laddr.ip)
        except psutil.NoSuchProcess:
            continue
    return found


def rank(job: dict[str, Any], group: Any, channel: Any) -> None:
    """Note who listens while the cluster stands."""
    Path(job["file"]).write_text(json.dumps(listening(job["driver"])))


def only_loopback(found: dict[str, list[str]]) -> bool:
    addresses = [ipaddress.ip_address(ip) for ips in found.values() for ip in ips]
    return all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in addresses)


def test_a_local_ray_cluster_listens_on_loopback_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    job = {"file": str(tmp_path / "listening.json"), "driver": os.getpid()}
    run_workers(
        "tests.security.test_loopback:rank", job, workers=1, device="cpu", folder=tmp_path, progress=lambda *_: None
    )
    found = json.loads((tmp_path / "listening.json").read_text())
    assert "raylet" in found, found
    assert only_loopback(found), json.dumps(found)


def test_prefects_embedded_server_listens_on_loopback_alone(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom flows.environment import prepare\n"
        "prepare(Path(sys.argv[1]))\nfrom prefect import flow\n"
        "@flow\ndef waits():\n    print('up', flush=True)\n    sys.stdin.readline()\nwaits()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "home")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        found, until = listening(child.pid), time.monotonic() + 60
        while not found and time.monotonic() < until:
            time.sleep(0.2)
            found = listening(child.pid)
        assert found
        assert only_loopback(found), json.dumps(found)
    finally:
        child.communicate("\n", timeout=60)
