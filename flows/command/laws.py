"""`lazytrain laws`: loss laws fitted to a table of runs, or to a run's own history, and what more compute should buy.

Changes nothing. A law that the columns do not allow, or the runs are too few for, is left out with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from data_contracts.errors import ConfigError, InputError
from data_contracts.records import Table
from flows.command.screen import console, rich_table
from flows.readable import text
from flows.workspace import CONFIG_FILE

if TYPE_CHECKING:
    from stages.governor.law_report import LawReport

app = typer.Typer(add_completion=False)


@app.command()
def laws(
    table: Annotated[
        Path | None,
        typer.Option(
            help="A CSV with a line a run: `loss`, and what laws read: parameters, tokens (unique); batch, steps; "
            "flops, compression."
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(help="A run's id or the start of it: its own evaluations.")] = None,
    config: Annotated[Path, typer.Option(help="The configuration whose store holds the run.")] = Path(CONFIG_FILE),
    law: Annotated[list[str] | None, typer.Option(help="A law; unset is every one that the columns allow.")] = None,
    flops: Annotated[
        float | None, typer.Option(min=1, help="Compute to expect a loss at, such as 1e20; of a run: of its training.")
    ] = None,
    unique: Annotated[
        float | None,
        typer.Option(min=1, help="Different tokens in the data, for muennighoff: of the run, and at --flops."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Fit loss laws to a table of runs, or to a run's own evaluations.

    Prints each law's constants with 80 % intervals, its error and how often its interval held on the fifth of the runs
    with the most compute (asked for after a fit to the others), and with --flops the best split of that compute and the
    loss expected there: of a table at that split, of a run at its own model's size. No law can rise: of a run that
    over-fits every one expects too little.
    """
    from data_contracts.method import names
    from stages.governor.law import LossModel

    if (table is None) == (run is None):
        raise ConfigError("one of --table FILE and --run RUN", "both or none is given", "give the other one alone")
    unknown = sorted(set(law or ()) - set(names(LossModel)))
    if unknown:
        raise ConfigError(f"laws among {', '.join(names(LossModel))}", f"--law {unknown[0]}", "name one of these")
    found, left_out = (
        of_table(table, law, flops, unique) if table is not None else of_run(config, str(run), law, flops, unique)
    )
    source = table.name if table is not None else f"run {run}"
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise InputError("runs that a law can be fitted to", f"{source}: {why}", "add columns or runs")
    if as_json:
        facts = {"source": source, "laws": [item.model_dump() for item in found], "left_out": left_out}
        typer.echo(json.dumps(facts, allow_nan=False))
        return
    out = console()
    for item in found:
        out.print(rich_table(constants(item)))
    out.print(rich_table(errors(found)))
    if flops is not None:
        out.print(rich_table(expected(found, flops)))
    for name, reason in left_out.items():
        out.print(Text(f"{name}: left out, {reason}"), soft_wrap=True)


Found = tuple[list["LawReport"], dict[str, str]]
"""What laws say, and why others say nothing."""


def of_table(table: Path, wanted: list[str] | None, flops: float | None, unique: float | None) -> Found:
    """Return what the laws say of a table."""
    from stages.governor.law import LossModel
    from stages.governor.law_report import read_runs, report

    runs = read_runs(table)

    def one(law: LossModel) -> LawReport:
        return report(law, runs, flops=flops, unique=unique)

    return _each(wanted, set(runs), one)


def of_run(config: Path, run: str, wanted: list[str] | None, flops: float | None, unique: float | None) -> Found:
    """Return what the laws say of a run's own evaluations."""
    from flows.workspace import Workspace
    from stages.governor.law import LossModel, history
    from stages.governor.law_report import report

    workspace = Workspace.read(config)
    from flows.environment import prepare

    prepare(workspace.home)
    from flows.histories import history_of

    own = history_of(workspace, run)
    last = own.state.evaluations[-1]

    def one(law: LossModel) -> LawReport:
        runs = history(own.state, own.body if law.without_embeddings else own.parameters, unique)
        ahead = None
        if flops is not None:
            grown = flops / last.flops
            ahead = {name: float(runs[name][-1]) for name in ("parameters", "batch")}
            ahead |= {"tokens": grown * last.tokens, "steps": grown * last.step}
        return report(law, runs, flops=flops, given=ahead, unique=unique)

    return _each(wanted, set(history(own.state, own.parameters, unique)), one)


def _each(wanted: list[str] | None, columns: set[str], one: Any) -> Found:
    from data_contracts.method import names, resolve
    from stages.governor.law import LossModel

    found, left_out = [], {}
    for name in wanted or names(LossModel):
        law = resolve(LossModel, {"method": name}, "law")
        absent = [column for column in law.reads if column not in columns]
        if absent:
            left_out[name] = f"it reads {', '.join(law.reads)} and there is no {', '.join(absent)}"
            continue
        try:
            found.append(one(law))
        except InputError as error:
            left_out[name] = f"it needs {error.promised}: {error.found}"
    return found, left_out


def constants(item: LawReport) -> Table:
    """Return a law's constants."""
    rows = tuple(
        (one.name, one.value, "kept: not told" if one.low is None else f"{text(one.low)} to {text(one.high)}")
        for one in item.constants
    )
    return Table(title=f"{item.law}, fitted to {item.runs} runs", columns=("constant", "value", "80 %"), rows=rows)


def errors(found: list[LawReport]) -> Table:
    """Return how far off the laws are on the runs of most compute."""
    rows = tuple(
        (item.law, one.runs, one.error, one.coverage) if (one := item.held_out) else (item.law, 0, None, item.why_not)
        for item in found
    )
    columns = ("law", "runs", "mean absolute error", "inside 80 %")
    return Table(title="The fifth with the most compute, told by the others", columns=columns, rows=rows)


def expected(found: list[LawReport], flops: float) -> Table:
    """Return the loss that each law expects, and how it would split the compute."""
    rows = []
    for item in found:
        one = item.expected
        assert one is not None
        assert item.optimal is not None
        split = ", ".join(f"{name} {text(value)}" for name, value in item.optimal.items())
        rows.append((item.law, one.loss, f"{text(one.low)} to {text(one.high)}", split))
    columns = ("law", "loss", "80 %", "best split")
    return Table(title=f"At {text(flops)} FLOPs", columns=columns, rows=tuple(rows))
