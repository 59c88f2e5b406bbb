"""`lazytrain run`: the pipeline of one configuration file, in this process, with an embedded Prefect server.

Where `PREFECT_API_URL` names a server, that one is used. What was committed before is reused; the summary at the end
tells what this run did, what it cost and where to look.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.answers import server_answers
from flows.command.screen import console, screen
from flows.embedded import starting_server
from flows.environment import prepare
from flows.outcome import Outcome
from flows.workspace import CONFIG_FILE, Workspace

app = typer.Typer(add_completion=False)


OutcomeFile = Annotated[Path | None, typer.Option("--outcome", help="Write what came of the run here, as JSON.")]


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="The configuration file.")] = Path(CONFIG_FILE),
    outcome: OutcomeFile = None,
) -> None:
    """Run the pipeline of a configuration; what is unchanged is reused."""
    execute(config, outcome)


def execute(
    config: Path, report: Path | None = None, *, resumes: str | None = None, raised: dict[str, Any] | None = None
) -> Outcome:
    """Run the pipeline of `config`, show its progress and its summary, and return its outcome.

    Args:
        config: the configuration file.
        report: where the outcome is written as JSON; unset is nowhere.
        resumes: the past run to go on with, by the configuration that it recorded.
        raised: sections of limits that it goes on with where they are others than recorded.

    Raises `ConfigError` before anything starts, and whatever a stage refuses.
    """
    workspace = Workspace.read(config)
    if resumes is None:
        workspace.check()
    prepare(workspace.home, offline=workspace.offline)
    file, home = workspace.shown(workspace.file), workspace.shown(workspace.home)
    console().print(f"running {file} (state under {home})", soft_wrap=True)
    with starting_server():
        from prefect.settings import temporary_settings

        from data_contracts.store import Store
        from flows.calling import REPORTER
        from flows.command.summary import show_outcome
        from flows.pipeline import pipeline

        REPORTER.set(screen())
        Store(workspace.address)  # brings its database up to date
    # No automation watches a run without a tag, and the thread of each flow run's signs of life takes a second to end.
    unwatched = temporary_settings({"flows.heartbeat_frequency": None})
    with unwatched, server_answers("see that it runs; `lazytrain resume` goes on from what was committed"):
        outcome: Outcome = pipeline(str(workspace.file), resumes=resumes, raised=raised)
    show_outcome(outcome, workspace)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(outcome.model_dump_json(indent=1), encoding="utf-8")
    return outcome
