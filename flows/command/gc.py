"""`lazytrain gc`: what no run refers to any more, listed; with `--delete`, removed.

To let go of a run, delete it in MLflow (its page, or `mlflow runs delete`): what only it referred to is then listed
here. What a registered model or any other run descends from stays, and so does whatever is at work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from data_contracts.records import Table
from flows.command.screen import console, rich_table
from flows.environment import prepare
from flows.readable import size
from flows.workspace import CONFIG_FILE, Workspace

app = typer.Typer(add_completion=False)

DAY_SECONDS = 86400.0


@app.command()
def gc(
    config: Annotated[Path, typer.Option(help="The configuration whose store is cleaned.")] = Path(CONFIG_FILE),
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is listed; without it nothing is.")] = False,
    unfinished_days: Annotated[
        float, typer.Option(min=0, help="How long the work of an attempt that did not finish is kept to be resumed.")
    ] = 14.0,
) -> None:
    """List what no run refers to any more, and with --delete remove it."""
    workspace = Workspace.read(config)
    prepare(workspace.home)
    from data_contracts.store import Store

    if workspace.unused:
        console().print(f"no run yet under {workspace.shown(workspace.home)}", soft_wrap=True)
        return
    garbage = Store(workspace.address).garbage(unfinished_seconds=unfinished_days * DAY_SECONDS)
    found = garbage.find()
    if garbage.unreadable:
        names = ", ".join(run[:12] for run in garbage.unreadable[:5])
        console().print(Text(f"note: deleted runs are left alone, since what {names} descends from cannot be read"))
    if not found:
        console().print("nothing to remove: every artifact and folder is referred to")
        return
    console().print(rich_table(table(found)))
    total = size(sum(item.bytes for item in found))
    if not delete:
        console().print(f"{len(found)} of {total} in all; remove them: lazytrain gc --delete", soft_wrap=True)
        return
    gone = garbage.remove(found)
    freed = size(sum(item.bytes for item in gone))
    console().print(f"removed {len(gone)} of {len(found)}, {freed}", soft_wrap=True)
    if len(gone) < len(found):
        console().print("the others are in use again, or at work")


def table(found: list[Any]) -> Table:
    """Return what was found, for people."""
    rows = tuple((item.kind, item.name[:12], item.why, size(item.bytes)) for item in found)
    return Table(title="No run refers to", columns=("what", "name", "why", "size"), rows=rows)
