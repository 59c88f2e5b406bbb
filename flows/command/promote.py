"""`lazytrain promote`: store the metrics of a file in a tracking store, each under a legal name, none lost.

Promotion of a trained checkpoint is the last stage of a run and moves an alias only on its verdict; this stores what a
promotion elsewhere is to be judged by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from data_contracts.records import StoreAddress, Table
from flows.command.screen import console, rich_table
from flows.environment import prepare

app = typer.Typer(add_completion=False)


@app.command()
def promote(
    metrics: Annotated[Path, typer.Option(help="A JSON object of metric names and numbers.")],
    registry: Annotated[str, typer.Option(help="MLflow tracking URI, such as sqlite:///m.db.")],
    work: Annotated[Path, typer.Option(help="Folder for work in progress.")] = Path(".lazytrain/work"),
) -> None:
    """Store a metrics file in a tracking store."""
    prepare()
    from stages.promote.plain import store_metrics

    stored = store_metrics(metrics, StoreAddress(tracking_uri=absolute(registry), work_uri=str(work.resolve())))
    rows = tuple((name, legal, stored.values[name]) for name, legal in stored.names.items())
    console().print(rich_table(Table(title="Stored", columns=("metric", "stored as", "value"), rows=rows)))
    console().print(f"run {stored.run} in {registry}", soft_wrap=True)


def absolute(uri: str) -> str:
    """Return an SQLite URI of a relative path as one of an absolute path; any other as it is."""
    prefix = "sqlite:///"
    if uri.startswith(prefix) and not uri.startswith(f"{prefix}/"):
        return f"{prefix}{Path(uri.removeprefix(prefix)).resolve()}"
    return uri
