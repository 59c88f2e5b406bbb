"""`lazytrain status`: the runs of a store, and of one run its attempts, costs, decisions and verdict.

Runs and attempts whose process is gone are closed first, in MLflow and Prefect alike, so that nothing that is dead
shows as running. Where Prefect's server does not answer, the store is shown and the command then fails with that.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from data_contracts.cost import Cost, Price
from data_contracts.errors import ArtifactError, LazyTrainError
from data_contracts.records import Decision, Promotion, Table, Verdict
from flows.answers import server_answers
from flows.command.screen import console, rich_table
from flows.command.summary import costs_table, spent_line
from flows.embedded import starting_server
from flows.environment import prepare
from flows.histories import match
from flows.readable import duration
from flows.workspace import CONFIG_FILE, Workspace

app = typer.Typer(add_completion=False)


@app.command()
def status(
    config: Annotated[Path, typer.Option(help="The configuration whose store is shown.")] = Path(CONFIG_FILE),
    run: Annotated[str | None, typer.Option(help="A run's id or the start of it; unset is the newest.")] = None,
) -> None:
    """Show runs, attempts, costs, decisions and the verdict."""
    workspace = Workspace.read(config)
    prepare(workspace.home)
    from data_contracts.store import Store

    if workspace.unused:
        console().print(f"no run yet under {workspace.shown(workspace.home)}: lazytrain run {config}", soft_wrap=True)
        return
    store = Store(workspace.address)
    closed, unanswered = len(store.reconcile()), None
    try:
        closed += close_lost_flows(workspace.home)
    except LazyTrainError as error:  # the store is shown all the same
        unanswered = error
    if closed:
        console().print(f"{closed} runs whose process is gone were closed as failed")
    runs = list(store.runs())
    console().print(rich_table(runs_table(runs[:20])))
    if runs:
        chosen = match(runs, run)
        show_run(store, chosen, workspace.config.budget.price)
    if unanswered is not None:
        raise unanswered


def close_lost_flows(home: Path) -> int:
    """Close Prefect's runs whose process is gone, and return how many there were.

    The embedded server takes seconds to start: it is started for this only where its database holds an open run.
    """
    database = home / "prefect" / "prefect.db"
    if "PREFECT_API_URL" not in os.environ:
        if not database.exists():
            return 0
        with closing(sqlite3.connect(database, timeout=10)) as link:
            rows = link.execute("SELECT 1 FROM flow_run WHERE state_type IN ('PENDING', 'RUNNING') LIMIT 1")
            if rows.fetchone() is None:
                return 0
    with starting_server():
        from flows.reconcile import reconcile
    with server_answers():
        return len(reconcile())


def runs_table(runs: list[Any]) -> Table:
    """Return the pipeline runs, newest first."""
    rows = tuple(
        (
            item.run[:12],
            item.name,
            item.status.lower(),
            datetime.fromtimestamp(item.started, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            duration(item.seconds) if item.seconds is not None else None,
            f"resumes {item.resumes[:12]}" if item.resumes and not item.reason else item.reason,
        )
        for item in runs
    )
    return Table(title="Runs", columns=("run", "name", "status", "started (UTC)", "time", "why"), rows=rows)


def show_run(store: Any, run: Any, price: Price | None = None) -> None:
    """Print one run: attempts, ledger by stage and by cause, lost attempts in it, decisions, verdict."""
    attempts, users = store.attempts(run.run), store.users()
    console().print(rich_table(attempts_table(run.run, attempts, users)))
    refs = [ref for item in attempts for ref in item.refs.values()]
    if refs:
        ledger = store.ledger(refs, lost=True).priced(price)
        console().print(rich_table(costs_table(ledger.by_stage(), "stage", price)))
        console().print(rich_table(costs_table(ledger.by_cause(), "cause", price)))
        now = sum(cost.flops for item in attempts if not item.cached for cost in item.costs.values())
        amortised = store.ledger(refs, lost=True, users=users).total.flops
        line = spent_line(ledger.total.flops, now, amortised, "spent in this run")
        console().print(Text(f"FLOPs      {line}"), soft_wrap=True)
    for item in attempts:
        try:
            show_records(store, item)
        except ArtifactError as error:
            console().print(Text(f"{item.name}: its record cannot be read: {error.found}", style="yellow"))


def show_records(store: Any, item: Any) -> None:
    """Print what one stage call decided."""
    if "decision" in item.refs:
        decision = store.record(item.refs["decision"], Decision)
        console().print(Text(f"decision   {item.name}: {decision.action}: {decision.reason}"))
    if "verdict" in item.refs:
        verdict = store.record(item.refs["verdict"], Verdict)
        console().print(Text(f"verdict    {verdict.outcome}: {verdict.reason}", style="bold"))
    if "promotion" in item.refs:
        promotion = store.record(item.refs["promotion"], Promotion)
        console().print(Text(f"promotion  {promotion.outcome}: {promotion.reason}"))


def attempts_table(run: str, attempts: list[Any], users: Mapping[str, int]) -> Table:
    """Return what each stage did in a run, and how many configurations' runs share it."""
    rows = []
    for item in attempts:
        total = Cost()
        for cost in item.costs.values():
            total += cost
        rows.append(
            (
                item.name,
                "reused" if item.cached else item.status.lower(),
                item.run[:12],
                total.flops,
                users.get(item.run),
                duration(item.seconds) if item.seconds is not None and not item.cached else None,
                item.reason,
            )
        )
    columns = ("stage", "status", "attempt", "FLOPs", "users", "time", "why")
    return Table(title=f"Stages of run {run[:12]}", columns=columns, rows=tuple(rows))
