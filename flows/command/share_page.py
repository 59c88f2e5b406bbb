"""The page of `lazytrain share`: every run's curve, where it goes on, and what its share is expected to bring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_contracts.records import Table

if TYPE_CHECKING:
    from flows.sharing import Share, Unit

DRAWN = 40


def write(path: Path, found: Sequence[Share], unit: Unit, pot: float, tables: Sequence[Table]) -> None:
    """Write the page to `path`."""
    from stages.page.html import Part, write_page

    note = (
        "Points: evaluations. Lines: the curve of each run's latest segment, continued to what its share trains, "
        "with its 80 % interval. Shares end where the next unit of the pot brings every run the same, by weight."
    )
    parts = [
        Part("Loss against FLOPs", note, figure=_curves(found), tall=True),
        Part("Shares", figure=_bars(found, unit)),
        *(Part(table.title, table=table) for table in tables),
    ]
    facts = {
        "pot": f"{pot:.6g} {unit}",
        **{f"{item.name} goes on by": item.command or item.portion.why for item in found},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(path, "Several runs, one budget", facts, parts)


def _curves(found: Sequence[Share]) -> dict[str, Any]:
    from stages.page.html import safe
    from stages.page.points import BLUE, GREEN, GREY, ORANGE

    data: list[dict[str, Any]] = []
    for place, item in enumerate(found):
        state, curve = item.begun.state, item.curve
        colour = (BLUE, ORANGE, GREEN, GREY)[place % 4]
        if state is None:
            continue
        seen = state.evaluations
        data.append({"type": "scatter", "mode": "markers", "name": safe(item.name), "marker": {"color": colour},
                     "x": [p.flops for p in seen], "y": [state.shown(p.loss) for p in seen]})  # fmt: skip
        if curve is None or not item.portion.flops:
            continue
        at = np.linspace(state.flops, state.flops + item.portion.flops, DRAWN).tolist()
        told = [curve.loss(flops) for flops in at]
        data.append({"type": "scatter", "name": "80 %", "x": at + at[::-1], "hoverinfo": "skip", "showlegend": False,
                     "y": [t.high for t in told] + [t.low for t in told][::-1], "fill": "toself",
                     "opacity": 0.25, "fillcolor": colour, "line": {"width": 0}})  # fmt: skip
        data.append({"type": "scatter", "mode": "lines", "name": f"{safe(item.name)}, its share", "x": at,
                     "y": [t.expected for t in told], "line": {"color": colour, "dash": "dash"}})  # fmt: skip
    axes = {
        "xaxis": {"title": {"text": "FLOPs of training"}, "type": "log", "exponentformat": "e"},
        "yaxis": {"title": {"text": "validation loss"}},
    }
    return {"data": data, "layout": {**axes, "margin": {"t": 20}}}


def _bars(found: Sequence[Share], unit: Unit) -> dict[str, Any]:
    from stages.page.html import safe
    from stages.page.points import BLUE, GREY

    names = [safe(item.name) for item in found]
    bars = [
        {"type": "bar", "orientation": "h", "name": name, "x": amounts, "y": names, "marker": {"color": colour}}
        for name, colour, amounts in (
            ("goes on from", GREY, [item.begun.kept_of(unit) for item in found]),
            ("share", BLUE, [item.portion.part for item in found]),
        )
    ]
    axes = {"xaxis": {"title": {"text": unit}, "exponentformat": "e"}, "yaxis": {"autorange": "reversed"}}
    return {"data": bars, "layout": {**axes, "barmode": "stack", "margin": {"t": 20}}}
