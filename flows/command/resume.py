"""`lazytrain resume RUN`: go on with a run, as a new run with a history of its own.

The configuration is the one that the past run recorded, whatever the file says by now; the file says where the store is
and where relative paths start. What was finished is adopted, what was begun goes on from its work folder, and the past
run stays as it is. A run that finished goes on under a higher budget: its training from before its closing decay. With
other memory or workers its next segment is planned anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from data_contracts.errors import ConfigError
from flows.command.plain import nested
from flows.command.run import OutcomeFile, execute
from flows.command.screen import console
from flows.command.settings import settings
from flows.environment import prepare
from flows.histories import match
from flows.standing import Raised, check
from flows.workspace import CONFIG_FILE, Workspace

app = typer.Typer(add_completion=False)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="The run's id, or the start of it (see `lazytrain status`).")],
    config: Annotated[Path, typer.Option(help="The configuration file, where it stands now.")] = Path(CONFIG_FILE),
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Another limit to go on with, finished or not: budget.flops=5e15 (tokens, seconds, money, "
            "peak_bytes), govern.rounds=4, train.workers=2. What was trained is kept; only a closing decay is made "
            "again.",
        ),
    ] = None,
    outcome: OutcomeFile = None,
) -> None:
    """Go on with a run that did not finish, or under a higher budget, from the configuration it recorded."""
    if not config.is_file():
        raise ConfigError(
            "`--config` is the configuration file of the run, which says where its store is",
            f"there is no file {config}",
            "give the place where it stands now: lazytrain resume RUN --config FILE",
        )
    workspace = Workspace.read(config)
    prepare(workspace.home, offline=workspace.offline)
    raised = nested(settings(options))
    past = resumable(workspace, run, raised)
    console().print(f"going on with run {past} by the configuration that it recorded", soft_wrap=True)
    execute(config, outcome, resumes=past, raised=raised or None)


def resumable(workspace: Workspace, start: str, raised: Raised | None = None) -> str:
    """Return the id of the run that begins with `start`.

    Raises `ArtifactError` for an unknown one; `ConfigError` for one that finished where no limit is `raised`, that
    still runs, or that was one stage alone, and for a setting that is no such limit.
    """
    from data_contracts.store import Store

    store = Store(workspace.address)
    store.reconcile()
    past = match(store.runs(), start)
    if past.status == "FINISHED" and not raised:
        raise ConfigError(
            "a run that did not finish, or a higher budget",
            f"run {past.run} finished",
            "start a new one: lazytrain run (all is reused), or go on with it: --set budget.flops=…",
        )
    if past.status == "RUNNING":
        raise ConfigError("a run that has ended", f"run {past.run} is at work", "wait for it, or end it first")
    config = store.run_config(past.run)
    name = config["name"]
    if past.name != name:
        raise ConfigError(
            "a run of the whole pipeline",
            f"run {past.run} ({past.name}) was one stage alone",
            "lazytrain stage NAME --run RUN",
        )
    if raised:
        check(raised, past.run)
        workspace.recorded(config, raised)
    return past.run
