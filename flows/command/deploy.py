"""`lazytrain deploy KIND`: what a team's Prefect server needs to run the pipeline and its stages, in one go.

Makes the work pool of that kind, the deployments of `prefect.yaml` on it, and the automations that close runs whose
machine died. Doing it again brings them up to date; a schedule that was changed or paused meanwhile stays as it is. The
server is the one that `PREFECT_API_URL` names.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from data_contracts.errors import ConfigError, TransientError
from flows.answers import server_answers
from flows.command.screen import console
from flows.environment import prepare

app = typer.Typer(add_completion=False)
BUSY = "Server error '5"
"""What Prefect's command says of an answer 5xx, after its retries: SQLite locked for long, a proxy without a server."""
PREFECT_YAML = Path(__file__).resolve().parent.parent.parent / "prefect.yaml"


@app.command()
def deploy(
    kind: Annotated[
        Literal["process", "docker", "kubernetes"], typer.Argument(help="What a flow run is: the kind of work pool.")
    ] = "process",
    config: Annotated[
        str | None, typer.Option(help="The configuration file, where a worker of that pool finds it.")
    ] = None,
    stages: Annotated[
        Literal["in_process", "process", "docker", "kubernetes"] | None,
        typer.Option(help="Where the pipeline's stages run; unset is in its own process."),
    ] = None,
    cron: Annotated[
        str | None, typer.Option(help="When the pipeline runs; unset is as it was or in prefect.yaml.")
    ] = None,
) -> None:
    """Put the pipeline and its stages on a team's Prefect server."""
    prepare()
    if "PREFECT_API_URL" not in os.environ:
        raise ConfigError(
            "PREFECT_API_URL names a team's Prefect server",
            "it is not set",
            "`lazytrain ui` serves one on this machine and says its address",
        )
    with server_answers():
        file = only(yaml.safe_load(PREFECT_YAML.read_text(encoding="utf-8")), kind, config, stages, cron)
        install(kind, file if cron is not None else without_known_schedules(file))


def install(kind: Literal["process", "docker", "kubernetes"], file: dict[str, Any]) -> None:
    """Put the pool of a kind, the deployments of `file` and the automations on the server."""
    from flows.automations import install as install_automations
    from flows.pools import install as install_pool

    pool = install_pool(kind)
    console().print(f"work pool   {pool}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefect.yaml"
        path.write_text(yaml.safe_dump(file, sort_keys=False), encoding="utf-8")
        done = subprocess.run(  # noqa: S603 - a fixed command
            [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(path)],
            cwd=PREFECT_YAML.parent,
            capture_output=True,
            text=True,
            check=False,
        )
    said = done.stdout + done.stderr
    if done.returncode and BUSY in said:
        raise TransientError(
            "the Prefect server stores the deployments", said[-2000:], "try again when it is less busy"
        )
    if done.returncode:
        raise ConfigError("Prefect takes the deployments", said[-2000:], "see its message")
    for deployment in file["deployments"]:
        console().print(f"deployment  {deployment['entrypoint'].rpartition(':')[2]}/{kind}")
    for name in install_automations():
        console().print(f"automation  {name}")
    console().print(f"[dim]prefect worker start --pool {pool}[/]")


def without_known_schedules(file: dict[str, Any]) -> dict[str, Any]:
    """Return `file` without the schedules of deployments that the server knows: Prefect then leaves theirs alone."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    kept = []
    with get_client(sync_client=True) as client:
        for deployment in file["deployments"]:
            flow = deployment["entrypoint"].rpartition(":")[2]
            try:
                client.read_deployment_by_name(f"{flow}/{deployment['name']}")
            except ObjectNotFound:
                kept.append(deployment)
            else:
                kept.append({name: value for name, value in deployment.items() if name != "schedules"})
    return {**file, "deployments": kept}


def only(file: dict[str, Any], kind: str, config: str | None, stages: str | None, cron: str | None) -> dict[str, Any]:
    """Return the content of `prefect.yaml` with the deployments of one kind, and what was asked for set in them."""
    chosen = [deployment for deployment in file["deployments"] if deployment["name"] == kind]
    for deployment in chosen:
        given = {"config_file": config, "stages": stages if "schedules" in deployment else None}
        deployment["parameters"] = {**deployment["parameters"], **{k: v for k, v in given.items() if v is not None}}
        if cron is not None and "schedules" in deployment:
            deployment["schedules"] = [{**schedule, "cron": cron} for schedule in deployment["schedules"]]
    return {name: value for name, value in file.items() if name != "definitions"} | {"deployments": chosen}
