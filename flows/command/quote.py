"""`lazytrain quote`: what a run is expected to come to, before it is paid for, and how good past quotes were.

It makes a run's own first stages and, within a twentieth of the budget, its probes, in this process and without a
server; a run afterwards adopts them. Money is hours at `budget.price`; joules are at the watts that the machine told
while it trained, else at stated ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from data_contracts.cost import Price
from data_contracts.quotes import HOURS_FILE, Hours, Quote, Span, summed
from data_contracts.records import Table
from flows.command.screen import console, rich_table, screen
from flows.environment import prepare
from flows.readable import text
from flows.workspace import CONFIG_FILE, Workspace

if TYPE_CHECKING:
    from stages.governor.past import Scores

app = typer.Typer(add_completion=False)
WATTS = 65.0
"""A desktop processor's, where the machine tells none."""


@app.command()
def quote(
    config: Annotated[Path, typer.Argument(help="The configuration file.")] = Path(CONFIG_FILE),
    watts: Annotated[
        float, typer.Option(min=0, help="What the machine draws, for joules, where it does not tell.")
    ] = WATTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Say what a run is expected to come to: the chance that choosing beats chance, loss, FLOPs, hours, money, joules.

    Each comes with an 80 % interval. Probes take at most 5 % of the budget; a run of the same configuration adopts what
    it would make as well. Where the budget has no room for probes, plan and words alone answer, and it says what is not
    known.
    """
    workspace = Workspace.read(config).check()
    prepare(workspace.home, offline=workspace.offline)
    from data_contracts.store import Store
    from flows.calling import REPORTER, call_directly
    from flows.past_quotes import past_quotes, scores
    from flows.pipeline_run import recorded
    from flows.quote import quote as made

    if not as_json:
        REPORTER.set(screen())
    store = Store(workspace.address)
    with recorded(workspace, store, call_directly, f"{workspace.config.name}-quote") as run:
        result = made(run)
    ref = result.refs["quote"]
    told = store.record(ref, Quote)
    hours = Hours.model_validate_json((store.measured(ref) / HOURS_FILE).read_bytes())
    past = past_quotes(store)
    sheet = Sheet(told, hours, workspace.config.budget.price, watts)
    if as_json:
        facts = {
            "quote": told.model_dump(mode="json"),
            "hours": hours.model_dump(mode="json"),
            "answer": sheet.answer(),
            "joint": {name: [span.model_dump() for span in spans] for name, spans in sheet.joint().items()},
            "past": scores(past).model_dump(mode="json"),
            "page": str(store.measured(ref) / "quote.html"),
        }
        typer.echo(json.dumps(facts, allow_nan=False))
        return
    out = console()
    for table in sheet.tables():
        out.print(rich_table(table))
    for words in told.unknown:
        out.print(Text(f"not known: {words}"))
    out.print(Text(sheet.spent()))
    out.print(Text(past_line(scores(past))))
    out.print(Text(f"page: {workspace.shown(store.measured(ref) / 'quote.html')}"), soft_wrap=True)


class Sheet:
    """A quote for people: with money at a price, and joules at the machine's watts or at stated ones."""

    def __init__(self, quote: Quote, hours: Hours, price: Price | None, watts: float) -> None:
        self.quote, self.hours, self.price = quote, hours, price
        self.watts = watts if hours.watts is None else hours.watts

    def answer(self) -> dict[str, dict[str, float | str] | None]:
        """Return what the run as configured is expected to come to; None is not known."""
        from stages.governor.past import choice

        offer, seconds = self.quote.offer(self.quote.follows), self.hours.seconds[self.quote.follows]
        chosen = choice(self.quote)
        numbers = {
            "P(selection beats random)": (chosen.probability if chosen else None, chosen.basis if chosen else ""),
            "gain (nats)": (chosen.gain if chosen else None, chosen.arm if chosen else ""),
            "validation loss": (offer.loss, offer.arm),
            "FLOPs": (offer.flops, "the whole run, warm-up and probes included"),
            "hours": (seconds.times(1 / 3600), self.hours.basis),
            f"money ({self.price.currency})" if self.price else "money": (
                self._money(self.hours.stages[self.quote.follows]),
                "`budget.price`, stage by stage",
            ),
            "joules": (
                seconds.times(self.watts),
                f"{'estimated' if self.hours.watts is None else 'measured'} at {self.watts:.4g} W",
            ),
        }
        return {
            name: {**span.model_dump(), "told from": basis} if span else None for name, (span, basis) in numbers.items()
        }

    def _money(self, seconds: Mapping[str, Span]) -> Span | None:
        """Return what seconds by stage cost at each stage's price."""
        if self.price is None:
            return None
        return summed(span.times(self.price.hour_of(stage) / 3600) for stage, span in seconds.items())

    def joint(self) -> dict[str, list[Span]]:
        """Return money, where it has a price, and joules of every combination of the joint plan."""
        money = [span for by_stage in self.hours.joint if (span := self._money(by_stage)) is not None]
        joules = [summed(by_stage.values()).times(self.watts) for by_stage in self.hours.joint]
        return {**({f"money ({self.price.currency})": money} if self.price else {}), "joules": joules}

    def tables(self) -> list[Table]:
        """Return the answer, the ways of choosing, where training may end, the joint plan, and the ways of training."""
        from stages.quote.page import joint_table, offers_table, stops_table, ways_table

        rows: list[tuple[str | None, ...]] = []
        for name, value in self.answer().items():
            if value is None:
                why = "no `budget.price`" if name == "money" else ""
                rows.append((name, "not known", None, why))
            else:
                low, high = (shown(name, float(value[end])) for end in ("low", "high"))
                rows.append((name, shown(name, float(value["expected"])), f"{low} to {high}", str(value["told from"])))
        columns = ("", "expected", "80 % interval", "told from")
        tables = [Table(title=f"Quote of a run that takes {self.quote.follows}", columns=columns, rows=tuple(rows))]
        tables.append(offers_table(self.quote, self.hours))
        if self.quote.stops:
            tables.append(stops_table(self.quote))
        if self.quote.joint:
            tables.append(joint_table(self.quote, self.hours, self.joint()))
        return [*tables, ways_table(self.hours)]

    def spent(self) -> str:
        """Return what the quote took."""
        quote = self.quote
        share = quote.probe_flops / max(1, quote.spendable_flops)
        return (
            f"the quote took {text(quote.probe_flops)} FLOPs of probes ({share:.1%} of what may be spent)"
            f" after a warm-up of {text(quote.warm_up_flops)}"
            if quote.warm_up_flops
            else "the quote trained nothing"
        )


def shown(name: str, value: float) -> str:
    """Return one number of the answer for people."""
    return f"{value:.0%}" if name.startswith("P(") else f"{value:.4g}"


def past_line(scores: Scores) -> str:
    """Return how good past quotes were."""
    if not scores.quotes:
        return "past quotes: none that a run followed"
    parts = [f"past quotes: {scores.quotes}"]
    if scores.brier is not None:
        parts.append(f"Brier {scores.brier:.3f} of {scores.judged} (one half always: 0.25)")
    else:
        parts.append("no probability could be judged: that needs a run by the choice and one by chance")
    if scores.coverage is not None:
        kinds = ", ".join(f"{name} {held} of {of}" for name, (held, of) in scores.by_number.items())
        parts.append(f"80 % intervals held {scores.held} of {scores.intervals} ({kinds})")
    return "; ".join(parts)
