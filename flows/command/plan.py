"""`lazytrain plan`: what would be done and what it costs, without training.

It reads and tokenises the data and plans, in this process and without a server; both are committed, so that a run
afterwards reuses them. Without a configuration file it plans for `--model`, `--pool` and `--config lora.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from data_contracts.records import Origin, Plan, Ref, Request, Result, Table
from flows.command.screen import console, rich_table, screen, show
from flows.environment import prepare
from flows.readable import size, text
from flows.workspace import CONFIG_FILE, Workspace

app = typer.Typer()


@app.command()
def plan(config: Annotated[Path, typer.Argument(help="The configuration file.")] = Path(CONFIG_FILE)) -> None:
    """Say what would be done and what it costs, without training."""
    preview(Workspace.read(config))


def preview(workspace: Workspace) -> Plan:
    """Ingest and plan, print both summaries and what a run would cost, and return the plan."""
    prepare(workspace.home, offline=workspace.offline)
    from data_contracts.store import Store

    ingested = _stage(workspace, "ingest")
    needs = {name: ingested.ref(name) for name in ("base", "pool_tokens", "target_tokens")}
    planned = _stage(workspace, "plan", **needs)
    store = Store(workspace.address)
    for result in (ingested, planned):
        show(store.read_manifest(result.run).summary)
    chosen = store.record(planned.refs["plan"], Plan)
    console().print(rich_table(steps_table(chosen, workspace)))
    return chosen


def _stage(workspace: Workspace, verb: str, **inputs: tuple[Ref, ...]) -> Result:
    from stages.runner import run

    request = Request(
        verb=verb,
        config=workspace.config.slice(verb),
        inputs={name: refs for name, refs in inputs.items() if refs},
        store=workspace.address,
        origin=Origin(name=verb),
        knobs={"root": str(workspace.root)},
    )
    return run(request, reporter=screen())


def steps_table(chosen: Plan, workspace: Workspace) -> Table:
    """Return what a run would do with the plan, and the most it may spend."""
    config = workspace.config
    rows = (
        ("a segment of training", text(chosen.segment_flops), size(chosen.peak_bytes)),
        (f"at most {config.govern.rounds} rounds", text(chosen.segment_flops * config.govern.rounds), ""),
        ("budget", text(config.budget.flops), size(config.budget.peak_bytes) if config.budget.peak_bytes else "–"),
    )
    return Table(title="What a run would cost", columns=("", "FLOPs", "peak memory"), rows=rows)
