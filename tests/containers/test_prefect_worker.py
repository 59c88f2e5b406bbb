"""A real Prefect docker worker runs the score stage in its container, through the API that podman serves.

With `LAZYTRAIN_SCREENSHOTS=FOLDER` the whole pipeline runs so as well, and the UI's pages are photographed.
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

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]
POOL = "lazytrain-docker"
PICTURES = os.environ.get("LAZYTRAIN_SCREENSHOTS")


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


@pytest.fixture(scope="module")
def deployed(
    engine: Engine, worker_image: str, site: Site, server: dict[str, str], docker_host: str, tmp_path_factory: Any
) -> Iterator[Path]:
    """Deploy the stage score and the pipeline to a docker work pool, start its worker and return the worker's log."""
    folder = tmp_path_factory.mktemp("deployed")
    file, log = folder / "prefect.yaml", folder / "worker.log"
    file.write_text(yaml.safe_dump(deployments(worker_image, site)))
    for line in (
        ["work-pool", "create", POOL, "--type", "docker"],
        ["--no-prompt", "deploy", "--all", "--prefect-file", str(file)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *line], cwd=ROOT, env=server, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "docker"]
    with process(worker, {**server, "DOCKER_HOST": docker_host}, log):
        yield log
    for found in containers(engine, worker_image):
        engine.podman("rm", "-f", found["Id"])


def containers(engine: Engine, image: str) -> list[dict[str, Any]]:
    """Return the containers of an image, ended ones too."""
    found = json.loads(engine.podman("ps", "-a", "--format", "json").stdout)
    return [item for item in found if item["Image"] == image]


def deployments(image: str, site: Site) -> dict[str, Any]:
    """Return a prefect.yaml that deploys the stage score, and the pipeline, to a docker work pool."""
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
    common = {"name": "in-a-container", "work_pool": {"name": POOL, "job_variables": variables}}
    config = {"config_file": "/data/lazytrain.yaml"}
    stage = {
        "entrypoint": "flows/stage_flows.py:score",
        "description": "What each pool example is worth, in the container of the stage.",
        "parameters": {**config, "order": {"inputs": refs, "refresh": True}},
    }
    return {
        "name": "lazytrain",
        "pull": [{"prefect.deployments.steps.set_working_directory": {"directory": "/app"}}],
        "deployments": [
            {**common, **stage},
            {**common, "entrypoint": "flows/pipeline.py:pipeline", "parameters": config},
        ],
    }


def run_deployment(api: str, flow: str, log: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a deployment to its end, which must be a success, and return it and its flow run."""
    found = ask(f"{api}/deployments/name/{flow}/in-a-container")
    run = ask(f"{api}/deployments/{found['id']}/create_flow_run", {})

    def ended() -> Any:
        now = ask(f"{api}/flow_runs/{run['id']}")
        return now if now["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None

    seen = wait("end of the flow run", ended, 600, log)
    assert seen["state_type"] == "COMPLETED", log.read_text()[-8000:]
    return found, seen


def test_a_docker_worker_runs_the_score_stage_in_its_container(
    engine: Engine, worker_image: str, site: Site, server: dict[str, str], deployed: Path
) -> None:
    here = runner.run(site.request())
    give_away(site.folder)
    api = server["PREFECT_API_URL"]
    _, run = run_deployment(api, "score", deployed)
    (container,) = containers(engine, worker_image)
    assert container["Id"] in run["infrastructure_pid"]
    tasks = ask(f"{api}/task_runs/filter", {"task_runs": {"flow_run_id": {"any_": [run["id"]]}}})
    assert [(task["name"], task["state_type"]) for task in tasks] == [("score", "COMPLETED")]

    store = Store(site.address)
    (attempt,) = [row for row in store.attempts(store.runs()[0].run) if row.stage == "score"]
    assert (attempt.cached, attempt.run == here.run) == (False, False)
    assert {name: ref.digest for name, ref in attempt.refs.items()} == {
        name: ref.digest for name, ref in here.refs.items()
    }


@pytest.mark.skipif(PICTURES is None, reason="makes the pictures of the documentation: see docs/images/README.md")
def test_the_pages_of_a_run_of_the_pipeline_and_of_a_stage_are_photographed(
    site: Site, server: dict[str, str], deployed: Path
) -> None:
    give_away(site.folder)
    api = server["PREFECT_API_URL"]
    _, pipeline = run_deployment(api, "pipeline", deployed)
    stage, run = run_deployment(api, "score", deployed)
    ui = api.removesuffix("/api")
    for name, page in (
        ("pipeline-run", f"runs/flow-run/{pipeline['id']}"),
        ("stage-run", f"runs/flow-run/{run['id']}"),
        ("stage-form", f"deployments/deployment/{stage['id']}/run"),
    ):
        photograph(f"{ui}/{page}", Path(str(PICTURES)) / f"{name}.png")


def photograph(url: str, file: Path) -> None:
    """Take a picture of a page of the UI."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "pictures need Chromium: apt-get install chromium"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1000"]
    command += ["--virtual-time-budget=60000", f"--screenshot={file.resolve()}", url]
    subprocess.run(command, check=True, capture_output=True, timeout=180)
