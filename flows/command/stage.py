"""`lazytrain stage NAME --run RUN`: one stage again, on the inputs that a past run gave it.

The stage reads its part of the configuration as it stands now. It is a new attempt in a run of its own: the past run
and everything it committed stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from data_contracts.errors import ConfigError
from data_contracts.method import nearest
from flows.answers import server_answers
from flows.command.screen import console, screen, show
from flows.embedded import starting_server
from flows.environment import prepare
from flows.histories import match
from flows.workspace import CONFIG_FILE, Workspace
from stages.stage import VERBS

app = typer.Typer(add_completion=False)


@app.command()
def stage(
    name: Annotated[
        str, typer.Argument(help="The stage: ingest, plan, begin, score, select, train, govern, evaluate, …")
    ],
    run: Annotated[str, typer.Option(help="The past run's id, or the start of it (see `lazytrain status`).")],
    round_number: Annotated[
        int | None, typer.Option("--round", min=1, help="Its round; unset is the stage's last call.")
    ] = None,
    config: Annotated[Path, typer.Option(help="The configuration file.")] = Path(CONFIG_FILE),
) -> None:
    """Run one stage again on a past run's inputs: a new attempt, history kept."""
    if name not in VERBS:
        raise ConfigError("the name of a stage", f"no stage is called {name!r}", nearest(name, list(VERBS)))
    workspace = Workspace.read(config)
    prepare(workspace.home, offline=workspace.offline)
    with starting_server():
        from data_contracts.store import Store
        from flows.calling import REPORTER
        from flows.order import StageOrder
        from flows.stage_flows import STAGE_FLOWS

        store = Store(workspace.address)
        past = match(list(store.runs()), run)
    REPORTER.set(screen())
    with server_answers():
        result = STAGE_FLOWS[name](str(workspace.file), StageOrder(run=past.run, round=round_number, refresh=True))
    show(store.read_manifest(result.run).summary)
    console().print(f"attempt {result.run}; run {past.run} is as it was", soft_wrap=True)
