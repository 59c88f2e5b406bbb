"""What a user sees of a quote: one page beside the record, outside its digest.

`quote.html` draws each way of choosing's expected loss with its interval, the losses seen so far with their way on to
the end of the budget, and the tables that the command prints. One file that needs no network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.quotes import Hours, Quote, Span, summed
from data_contracts.records import Plan, Summary, Table
from stages.page.html import Part, safe, write_page
from stages.page.points import BLUE, GREY, ORANGE
from stages.stage import Work

PAGE = "quote.html"
SHOWN_JOINT = 10


def show(quote: Quote, hours: Hours, plan: Plan, curves: Sequence[pa.Table], summary: Summary, work: Work) -> None:
    """Write the page of the output `quote`; `curves` are the warm-up's and each probe's."""
    parts = [Part("Ways of choosing", "80 % intervals.", table=offers_table(quote, hours))]
    if any(offer.loss for offer in quote.offers):
        parts.append(Part("Expected loss at the end of the budget", figure=_losses(quote)))
        parts.append(
            Part(
                f"Where training with {quote.best} may end",
                "Validation loss seen so far, and expected by what is spent.",
                figure=_stops(quote, curves),
                table=stops_table(quote),
            )
        )
    if quote.joint:
        parts.append(Part("Joint plan", f"By {quote.objective}.", table=joint_table(quote, hours)))
    parts.append(Part("Ways of training", f"Of {quote.best}; {_told(hours)}.", table=ways_table(hours)))
    for reason in quote.unknown:
        parts.append(Part("Not known", reason))
    facts = {**summary.facts, "technique": plan.why}
    write_page(work.measured("quote", PAGE), summary.title, facts, parts)


def offers_table(quote: Quote, hours: Hours) -> Table:
    """Return the ways of choosing and what each is expected to come to."""
    columns = (
        "way", "of the pool", "beats chance", "told from", "gain (nats)", "validation loss", "FLOPs of a run", "hours",
    )  # fmt: skip
    rows = tuple(
        (
            f"{offer.arm} *" if offer.arm == quote.follows else offer.arm,
            f"{offer.fraction:.1%}",
            "–" if offer.chance else percent(offer.probability),
            "–" if offer.chance else offer.basis,
            "–" if offer.chance else number(offer.gain),
            number(offer.loss),
            number(offer.flops),
            number(hours.seconds[offer.arm].times(1 / 3600)),
        )
        for offer in quote.offers
    )
    return Table(title="Ways of choosing (* is what a run takes)", columns=columns, rows=rows)


def stops_table(quote: Quote) -> Table:
    """Return where training may end."""
    rows = tuple((f"{stop.share:.0%}", number(stop.loss), number(stop.flops)) for stop in quote.stops)
    return Table(
        title=f"Where training with {quote.best} may end",
        columns=("of what may be spent", "validation loss", "FLOPs of a run"),
        rows=rows,
    )


def joint_table(quote: Quote, hours: Hours | None = None, more: Mapping[str, Sequence[Span]] | None = None) -> Table:
    """Return the first combinations, and those of the best way of choosing whose loss is not known.

    `more` are further columns beside the hours, where those are given.
    """
    columns = [
        "choosing",
        "of the pool",
        "training",
        "of what may be spent",
        "beats chance",
        "validation loss",
        "FLOPs",
    ]
    seconds = [summed(by_stage.values()).times(1 / 3600) for by_stage in hours.joint] if hours else []
    beside = {**({"hours": seconds} if hours else {}), **(more or {})}
    rows = tuple(
        (
            row.arm,
            f"{row.fraction:.1%}",
            row.way,
            f"{row.share:.0%}",
            "–" if quote.offer(row.arm).chance else percent(quote.offer(row.arm).probability),
            number(row.loss) if row.loss else f"not known: {row.unknown}",
            number(row.flops) if row.flops_known else "not known",
            *(number(values[place]) for values in beside.values()),
        )
        for place, row in enumerate(quote.joint)
        if (row.arm == quote.best if row.loss is None else place < SHOWN_JOINT)
    )
    title = f"Joint plan, of {quote.combinations} combinations: {quote.objective}"
    return Table(title=title, columns=(*columns, *beside), rows=rows)


def ways_table(hours: Hours) -> Table:
    """Return the ways of training that fit."""
    rows = tuple((name, number(seconds.times(1 / 3600))) for name, seconds in hours.ways.items())
    return Table(title=f"Ways of training that fit ({_told(hours)})", columns=("way", "hours"), rows=rows)


def number(span: Span | None) -> str:
    """Return a number with its interval, for people."""
    if span is None:
        return "not known"
    expected, low, high = (f"{value:.4g}" for value in (span.expected, span.low, span.high))
    return f"{expected} [{low}, {high}]"


def percent(span: Span | None) -> str:
    """Return a probability with its interval, for people."""
    return "not known" if span is None else f"{span.expected:.0%} [{span.low:.0%}, {span.high:.0%}]"


def _told(hours: Hours) -> str:
    return "timed on this machine" if hours.basis == "timed" else "modelled, nothing was timed"


def _losses(quote: Quote) -> dict[str, Any]:
    known = [(offer.arm, offer.loss) for offer in quote.offers if offer.loss]
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [loss.expected for _, loss in known],
            "y": [safe(name) for name, _ in known],
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [loss.high - loss.expected for _, loss in known],
                "arrayminus": [loss.expected - loss.low for _, loss in known],
            },
            "marker": {"color": BLUE, "size": 11},
        }
    ]
    return {"data": data, "layout": {"xaxis": {"title": {"text": "validation loss, nats"}}, "margin": {"t": 20}}}


def _stops(quote: Quote, curves: Sequence[pa.Table]) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    start = 0
    for place, curve in enumerate(curves):
        seen = curve.filter(pc.fill_null(pc.is_finite(curve.column("validation_loss")), False))
        flops = [start + value for value in seen.column("flops").to_pylist()]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "warm-up" if place == 0 else f"probe {place}",
                "x": flops,
                "y": seen.column("validation_loss").to_pylist(),
                "line": {"color": GREY if place == 0 else ORANGE},
            }
        )
        start = flops[-1] if place == 0 and flops else start
    x = [stop.flops.expected for stop in quote.stops]
    for name, losses, dash in (
        ("expected", [stop.loss.expected for stop in quote.stops], "solid"),
        ("80 %", [stop.loss.low for stop in quote.stops], "dot"),
        ("80 %", [stop.loss.high for stop in quote.stops], "dot"),
    ):
        data.append(
            {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": losses,
             "line": {"color": BLUE, "dash": dash}, "showlegend": dash == "solid"}
        )  # fmt: skip
    axes = {"xaxis": {"title": {"text": "FLOPs"}}, "yaxis": {"title": {"text": "validation loss, nats"}}}
    return {"data": data, "layout": {**axes, "margin": {"t": 20}}}
