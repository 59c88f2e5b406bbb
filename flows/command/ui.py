"""`lazytrain ui`: the Prefect and MLflow pages of one store, served on this machine only, until ctrl-C.

Both are child processes on the loopback address and end with this one. A run started meanwhile should use this Prefect
server (`PREFECT_API_URL`, printed here) instead of starting a second one on the same database.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from data_contracts.errors import ConfigError, TransientError
from flows.command.screen import console
from flows.environment import prepare
from flows.workspace import CONFIG_FILE, Workspace

app = typer.Typer(add_completion=False)

HOST = "127.0.0.1"
START_SECONDS = 120.0
END_SECONDS = 10.0


@app.command()
def ui(
    config: Annotated[Path, typer.Option(help="The configuration whose store is shown.")] = Path(CONFIG_FILE),
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the Prefect pages.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the MLflow pages.")] = 5000,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop by itself after this long.")] = None,
) -> None:
    """Serve the Prefect and MLflow pages on this machine until ctrl-C."""
    workspace = Workspace.read(config)
    prepare(workspace.home)
    for name, port in (("--prefect-port", prefect_port), ("--mlflow-port", mlflow_port)):
        _require_free(name, port)
    workspace.home.mkdir(parents=True, exist_ok=True)
    logs = workspace.home / "ui"
    logs.mkdir(exist_ok=True)
    pages = {
        "Prefect": (prefect_command(prefect_port), {"PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{prefect_port}/api"}),
        "MLflow": (mlflow_command(workspace, mlflow_port), {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}),
    }
    children: dict[str, subprocess.Popen[bytes]] = {}
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    try:
        for name, (command, extra) in pages.items():
            with (logs / f"{name.lower()}.log").open("wb") as log:
                children[name] = subprocess.Popen(  # noqa: S603 - fixed commands
                    command, env={**os.environ, **extra}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
        for name, port in (("Prefect", prefect_port), ("MLflow", mlflow_port)):
            _wait(name, children[name], port, logs)
            console().print(f"{name:<8} http://{HOST}:{port}")
        console().print(f"[dim]use this server in another shell:  PREFECT_API_URL=http://{HOST}:{prefect_port}/api[/]")
        console().print("[dim]ctrl-C ends both[/]")
        _watch(children, logs, seconds)
    except KeyboardInterrupt:
        console().print("ending")
    finally:
        _end(list(children.values()))
        signal.signal(signal.SIGTERM, previous)


def prefect_command(port: int) -> list[str]:
    """Return the command of the Prefect server, on loopback."""
    return [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]


def mlflow_command(workspace: Workspace, port: int) -> list[str]:
    """Return the command of the MLflow server, on loopback, with one worker.

    Raises `ConfigError` where its program is not there.
    """
    beside = Path(sys.executable).with_name("mlflow")
    program = str(beside) if beside.exists() else shutil.which("mlflow")
    if program is None:
        raise ConfigError(
            f"the program `mlflow` stands beside {sys.executable} or on the PATH",
            "it is in neither",
            "install mlflow anew in this environment: pip install --force-reinstall --no-deps mlflow",
        )
    address = workspace.address
    artifacts = ["--default-artifact-root", address.artifact_uri] if address.artifact_uri else []
    return [program, "server", "--backend-store-uri", address.tracking_uri, *artifacts,
            "--host", HOST, "--port", str(port), "--workers", "1"]  # fmt: skip


def _open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((HOST, port)) == 0


def _require_free(option: str, port: int) -> None:
    if _open(port):
        raise ConfigError(f"port {port} is free", "something listens there", f"choose another port with {option}")


def _wait(name: str, child: subprocess.Popen[bytes], port: int, logs: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while not _open(port):
        if child.poll() is not None or time.monotonic() > until:
            raise TransientError(
                f"the {name} server starts",
                f"it did not answer on port {port}",
                f"see {logs / (name.lower() + '.log')}",
            )
        time.sleep(0.2)


def _watch(children: dict[str, subprocess.Popen[bytes]], logs: Path, seconds: float | None) -> None:
    until = None if seconds is None else time.monotonic() + seconds
    while until is None or time.monotonic() < until:
        for name, child in children.items():
            if child.poll() is not None:
                raise TransientError(
                    f"the {name} server runs",
                    f"it ended with {child.returncode}",
                    f"see {logs / (name.lower() + '.log')}",
                )
        time.sleep(0.5)


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        for child in children:
            if child.poll() is None or number == signal.SIGKILL:
                try:
                    os.killpg(child.pid, number)
                except ProcessLookupError:
                    continue
        until = time.monotonic() + END_SECONDS
        while any(child.poll() is None for child in children) and time.monotonic() < until:
            time.sleep(0.1)
        if all(child.poll() is not None for child in children):
            break
