"""`lazytrain share`: several runs, one pot of FLOPs, hours or money, and what each should get of it.

Reads what each configuration's newest run has shown; changes nothing. Each line ends in the command that goes on with
the run up to its share.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from data_contracts.errors import ConfigError
from data_contracts.records import Table
from flows.command.screen import console, rich_table
from flows.command.settings import settings
from flows.environment import prepare
from flows.readable import text
from flows.workspace import Workspace

if TYPE_CHECKING:
    from flows.sharing import Share, Unit

app = typer.Typer(add_completion=False)
UNITS = {"flops": "FLOPs", "hours": "hours", "money": "money"}
ONE = {"flops": "FLOP", "hours": "hour", "money": "unit of money"}


@app.command()
def share(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="The configuration files, one a run.")],
    flops: Annotated[float | None, typer.Option(min=0, help="FLOPs to share, such as 5e15.")] = None,
    hours: Annotated[float | None, typer.Option(min=0, help="Hours to share, at each run's own speed.")] = None,
    money: Annotated[
        float | None, typer.Option(min=0, help="Money to share: hours at each run's `budget.price`.")
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=2: what a nat of this run's loss is worth; 1. Different targets do not compare by themselves."
        ),
    ] = None,
    most: Annotated[list[str] | None, typer.Option(help="NAME=1e15: the most that this run may get.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page with the curves here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Divide a pot over several runs so that the sum of their expected losses, by weight, is lowest.

    Every run that has begun is continued on its own curve; all that get a part come to the same marginal gain, but for
    those at their most. A run that shows too little gets an equal part, one whose loss rises or does not fall nothing.
    No run is started: the commands that go on are printed.
    """
    unit, pot = _pot(flops, hours, money)
    workspaces = [Workspace.read(config) for config in configs]
    prepare(workspaces[0].home)
    from flows.sharing import shares

    weights, caps = _numbers("--weight", weight, least=0.0), _numbers("--most", most, least=-math.inf)
    found = shares(workspaces, pot, unit, weights, caps)
    if page is not None:
        from flows.command.share_page import write

        write(page, found, unit, pot, tables(found, unit))
    if as_json:
        typer.echo(json.dumps(facts(found, unit, pot, weights), allow_nan=False))
        return
    out = console()
    for table in tables(found, unit):
        out.print(rich_table(table))
    given = sum(item.portion.part for item in found)
    if given < pot * (1 - 1e-9):
        out.print(Text(f"{text(pot - given)} of the pot are left: nobody can use them"))
    for item in found:
        if item.portion.why:
            out.print(Text(f"{item.name}: {item.portion.why}"), soft_wrap=True)
        if item.begun.again and item.portion.flops:
            again = f"{text(item.begun.again)} FLOPs of training since its decay began are made again"
            more = item.portion.flops > item.begun.again
            out.print(Text(f"{item.name}: {again}{'' if more else ': more than its share, it pays with a larger pot'}"))
    for item in found:
        if item.command:
            out.print(Text(f"{item.name}: {item.command}"), soft_wrap=True)
    if page is not None:
        out.print(Text(f"page: {page}"), soft_wrap=True)


def tables(found: Sequence[Share], unit: Unit) -> tuple[Table, Table]:
    """Return what each run gets, and what that is expected to bring; gains are nats, by weight, of the pot's unit."""
    from flows.sharing import amount

    name = UNITS[unit]
    parts = tuple(
        (
            item.name,
            item.begun.run.status.lower() if item.begun.run else "not begun",
            amount(item.begun.spent, unit),
            item.begun.kept_of(unit),
            item.portion.part,
            item.portion.flops,
        )
        for item in found
    )
    brought = tuple(
        (
            item.name,
            item.begun.loss,
            item.portion.loss.expected if item.portion.loss else None,
            f"{item.portion.loss.low:.4g} to {item.portion.loss.high:.4g}" if item.portion.loss else None,
            None if item.portion.gain is None else f"{item.portion.gain:.3g}",
        )
        for item in found
    )
    columns = ("run", "", "spent", "goes on from", "share", "trains (FLOPs)")
    return (
        Table(title=f"Shares of the pot ({name})", columns=columns, rows=parts),
        Table(
            title="Validation loss",
            columns=("run", "where it goes on", "expected", "80 % interval", f"nats the next {ONE[unit]}"),
            rows=brought,
        ),
    )


def facts(found: Sequence[Share], unit: Unit, pot: float, weights: dict[str, float]) -> dict[str, Any]:
    """Return the same as one JSON object."""
    from flows.sharing import amount

    runs = [
        {
            "name": item.name,
            "run": item.begun.run.run if item.begun.run else None,
            "spent": amount(item.begun.spent, unit),
            "goes_on_from": item.begun.kept_of(unit),
            "share": item.portion.part,
            "limit": item.limit,
            "training_flops": item.portion.flops,
            "made_again_flops": item.begun.again,
            "weight": weights.get(item.name, 1.0),
            "loss_now": item.begun.loss,
            "loss": item.portion.loss.model_dump() if item.portion.loss else None,
            "marginal_gain": item.portion.gain,
            "why": item.portion.why,
            "command": item.command,
        }
        for item in found
    ]
    return {"pot": pot, "unit": unit, "runs": runs}


def _pot(flops: float | None, hours: float | None, money: float | None) -> tuple[Unit, float]:
    given: list[tuple[Unit, float]] = []
    for unit, amount in (("flops", flops), ("hours", hours), ("money", money)):
        if amount is not None:
            given.append((unit, amount))  # type: ignore[arg-type]
    if len(given) != 1 or not 0 < given[0][1] < math.inf:
        raise ConfigError("one pot above 0: --flops, --hours or --money", f"{len(given)} given", "such as --flops 5e15")
    return given[0]


def _numbers(option: str, given: Sequence[str] | None, *, least: float) -> dict[str, float]:
    """Read NAME=NUMBER options. Raises `ConfigError` for what is no number, or not above `least`, or below 0."""
    found = {}
    for name, value in settings(given).items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{option} NAME=NUMBER", f"it is {name}={value}", "give a number") from error
        if not (found[name] >= 0 and found[name] > least and math.isfinite(found[name])):
            raise ConfigError(f"{option} NAME=NUMBER that is not too low", f"it is {name}={value}", "give another")
    return found
