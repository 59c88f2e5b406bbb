"""A real Prefect docker worker runs the score stage in its container, through the API that podman serves.

With `LAZYTRAIN_SCREENSHOTS=FOLDER` the run and the deployment's form are photographed with headless Chromium as well.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_contracts.store import Store
from stages import runner
from tests.conftest import ROOT
from tests.containers.conftest import Site, give_away
from tests.containers.machine import Engine

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]
POOL = "lazytrain-docker"


@contextmanager
def process(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a session of its own, its output in `log`; end all of it afterwards."""
    with log.open("wb") as stream:
        running = subprocess.Popen(
            command, cwd=log.parent, env=env, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        yield running
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def wait(what: str, found: Any, seconds: float, *logs: Path) -> Any:
    """Return what `found()` returns once it is true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := found():
            return value
        time.sleep(0.5)
    raise AssertionError("\n".join([f"no {what} in {seconds} s", *(log.read_text()[-4000:] for log in logs)]))


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """Return what the server's API answers, None while it does not."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read() or b"null")
    except (ConnectionError, urllib.error.URLError):
        return None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a Prefect server and return the environment of its clients."""
    home = tmp_path_factory.mktemp("prefect")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with process(command, env, home / "server.log"):
        wait("server", lambda: ask(f"{env['PREFECT_API_URL']}/health"), 120, home / "server.log")
        yield env


@pytest.fixture(scope="module")
def docker_host(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve podman's API, which a docker client speaks, on a socket."""
    folder = tmp_path_factory.mktemp("podman")
    place = folder / "podman.sock"
    command = ["podman", "system", "service", "--time=0", f"unix://{place}"]
    with process(command, engine.env, folder / "service.log"):
        wait("podman service", place.exists, 30, folder / "service.log")
        yield f"unix://{place}"


def deployment(image: str, site: Site) -> dict[str, Any]:
    """Return a prefect.yaml that deploys the stage score to a docker work pool."""
    refs = {
        name: [site.ingested.refs[name].model_dump()]
        for name in ("base", "pool_tokens", "target_tokens", "pool", "target")
    }
    variables = {
        "image": image,
        "image_pull_policy": "Never",
        "network_mode": "host",
        "volumes": [f"{site.folder}:/data"],
        "env": {
            "LAZYTRAIN_MODELS": "/data",
            "PREFECT_HOME": "/tmp/prefect",  # else the worker's own, which the container cannot write
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        },
        "container_create_kwargs": {
            "read_only": True,
            "tmpfs": {"/tmp": ""},
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
        },
    }
    return {
        "name": "lazytrain",
        "pull": [{"prefect.deployments.steps.set_working_directory": {"directory": "/app"}}],
        "deployments": [
            {
                "name": "in-a-container",
                "entrypoint": "flows/stage_flows.py:score",
                "description": "What each pool example is worth, in the container of the stage.",
                "work_pool": {"name": POOL, "job_variables": variables},
                "parameters": {"config_file": "/data/lazytrain.yaml", "order": {"inputs": refs, "refresh": True}},
            }
        ],
    }


def test_a_docker_worker_runs_the_score_stage_in_its_container(
    engine: Engine, worker_image: str, site: Site, server: dict[str, str], docker_host: str, tmp_path: Path
) -> None:
    here = runner.run(site.request())
    give_away(site.folder)
    file = tmp_path / "prefect.yaml"
    file.write_text(yaml.safe_dump(deployment(worker_image, site)))
    for line in (
        ["work-pool", "create", POOL, "--type", "docker"],
        ["--no-prompt", "deploy", "--all", "--prefect-file", str(file)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *line], cwd=ROOT, env=server, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    api, log = server["PREFECT_API_URL"], tmp_path / "worker.log"
    deployed = ask(f"{api}/deployments/name/score/in-a-container")
    run = ask(f"{api}/deployments/{deployed['id']}/create_flow_run", {})
    worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "docker"]
    with process(worker, {**server, "DOCKER_HOST": docker_host}, log):

        def ended() -> Any:
            now = ask(f"{api}/flow_runs/{run['id']}")
            return now if now["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None

        try:
            seen = wait("end of the flow run", ended, 240, log)
        finally:
            containers = json.loads(engine.podman("ps", "-a", "--format", "json").stdout)
            ours = [found for found in containers if found["Image"] == worker_image]
            for found in ours:
                engine.podman("rm", "-f", found["Id"])
    assert seen["state_type"] == "COMPLETED", log.read_text()[-8000:]
    (container,) = ours
    assert container["Id"] in seen["infrastructure_pid"]
    tasks = ask(f"{api}/task_runs/filter", {"task_runs": {"flow_run_id": {"any_": [run["id"]]}}})
    assert [(task["name"], task["state_type"]) for task in tasks] == [("score", "COMPLETED")]

    store = Store(site.address)
    (attempt,) = [row for row in store.attempts(store.runs()[0].run) if row.stage == "score"]
    assert (attempt.cached, attempt.run == here.run) == (False, False)
    assert {name: ref.digest for name, ref in attempt.refs.items()} == {
        name: ref.digest for name, ref in here.refs.items()
    }
    if folder := os.environ.get("LAZYTRAIN_SCREENSHOTS"):
        ui = api.removesuffix("/api")
        photograph(f"{ui}/runs/flow-run/{run['id']}", Path(folder) / "stage-run.png")
        photograph(f"{ui}/deployments/deployment/{deployed['id']}/run", Path(folder) / "stage-form.png")


def photograph(url: str, file: Path) -> None:
    """Take a picture of a page of the UI."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "LAZYTRAIN_SCREENSHOTS needs Chromium: apt-get install chromium"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1000"]
    command += ["--virtual-time-budget=30000", f"--screenshot={file.resolve()}", url]
    subprocess.run(command, check=True, capture_output=True, timeout=180)
