"""What a user sees of a run's course: one page and one picture beside the decision, outside its digest.

`govern.html` draws the target's loss against FLOPs with the fitted curve, its band and every decision where it was
made, what is forgotten where that is watched, the marginal gain, and FLOPs by cause, and says what is left is expected
to buy; `govern.png` holds the first and the last of these. The page is one file that needs no network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_contracts.records import Summary, Table
from stages.govern.outlook import Band, Mark, Outlook
from stages.governor.state import Z95, Point, State
from stages.page.html import Part, safe, write_page
from stages.page.points import BLUE, GREEN, GREY, ORANGE
from stages.stage import Work

PAGE, PICTURE = "govern.html", "govern.png"
FORGETTING = (
    "Rise of the loss on the retention set above where the run began, with 1.64 standard errors; dashed: allowed."
)
GAINS = "Of the latest five evaluations, as each was seen; 90 % bounds."
AXIS = {"title": {"text": "FLOPs of training, evaluations included"}, "exponentformat": "e"}


def show(outlook: Outlook, made: Sequence[Mark], metric: str, summary: Summary, work: Work) -> None:
    """Write page and picture of the output `decision`; `summary` holds the tables."""
    band, table = outlook.band(), {table.title: table for table in summary.tables}
    note = (
        "The band is the 80 % interval of the latest segment's curve, continued to the end of what may be spent."
        if band is not None
        else "Too few evaluations of the latest segment to continue its curve."
    )
    made = [mark for mark in made if mark.loss is not None]
    causes = table["FLOPs by cause"]
    parts = [
        Part(f"{metric} against FLOPs", note, figure=_course(outlook.state, band, made, metric), tall=True),
        *([Part("Forgetting", FORGETTING, figure=_forgetting(outlook.state))] if outlook.state.retained else []),
        Part("Decisions", table=table["Decisions"]),
        Part("What the rest is expected to buy", table=table["What the rest is expected to buy"]),
        Part("Marginal gain", GAINS, figure=_gains(table["Marginal gain"])),
        Part("FLOPs by cause", figure=_causes(causes), table=causes),
        Part("Segments", table=table["Segments"]),
    ]
    write_page(work.measured("decision", PAGE), summary.title, summary.facts, parts)
    draw(work.measured("decision", PICTURE), outlook.state, band, made, causes, metric)


def _value(state: State, point: Point) -> float:
    return float(state.shown(point.loss) or 0.0)


def _course(state: State, band: Band | None, made: Sequence[Mark], metric: str) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    if band is not None:
        flops = band.flops_G.tolist()
        data.append(
            {
                "type": "scatter",
                "name": "80 %",
                "x": flops + flops[::-1],
                "y": band.high_G.tolist() + band.low_G.tolist()[::-1],
                "fill": "toself",
                "fillcolor": "rgba(58,143,92,0.18)",
                "line": {"width": 0},
                "hoverinfo": "skip",
            }
        )
        line = {"color": GREEN, "dash": "dash"}
        data.append({"type": "scatter", "mode": "lines", "name": "fitted", "x": flops, "y": band.middle_G.tolist(),
                     "line": line})  # fmt: skip
    for segment in range(state.last_segment + 1):
        points = state.segment(segment)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"segment {segment}: {safe(state.actions[segment])}",
                "x": [point.flops for point in points],
                "y": [_value(state, point) for point in points],
                "error_y": {"type": "data", "array": [point.se or 0.0 for point in points], "thickness": 1},
                "line": {"color": BLUE if segment % 2 else GREY},
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "decisions",
            "x": [mark.flops for mark in made],
            "y": [mark.loss for mark in made],
            "text": [f"{safe(mark.action)}: {safe(mark.reason)}" for mark in made],
            "hoverinfo": "text",
            "marker": {"color": ORANGE, "size": 13, "symbol": "diamond"},
        }
    )
    layout = {"xaxis": AXIS, "yaxis": {"title": {"text": safe(metric)}}, "margin": {"t": 20}, "hovermode": "closest"}
    return {"data": data, "layout": layout}


def _forgetting(state: State) -> dict[str, Any]:
    rises = ((point.flops, *(state.rise(point) or (math.nan, 0.0))) for point in state.points)
    seen = [told for told in rises if math.isfinite(told[1])]
    flops = [at for at, *_ in seen]
    errors = {"type": "data", "array": [Z95 * error for *_, error in seen], "thickness": 1}
    line: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "nats forgotten",
        "x": flops,
        "y": [rise for _, rise, _ in seen],
        "error_y": errors,
        "line": {"color": BLUE},
    }
    data = [line]
    allowed = state.retention.allowed if state.retention else None
    if allowed is not None and flops:
        ends: dict[str, Any] = {"x": [flops[0], flops[-1]], "y": [allowed, allowed]}
        dashed = {"color": ORANGE, "dash": "dash"}
        data.append({"type": "scatter", "mode": "lines", "name": "allowed", "line": dashed, **ends})
    axis = {"title": {"text": "nats above the start"}}
    return {"data": data, "layout": {"xaxis": AXIS, "yaxis": axis, "margin": {"t": 20}}}


def _gains(table: Table) -> dict[str, Any]:
    gains = [tuple(float(value or 0.0) for value in row) for row in table.rows]
    rates = [rate for _, rate, *_ in gains]
    line = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "nats a FLOP",
        "x": [flops for flops, *_ in gains],
        "y": rates,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [high - rate for _, rate, _, high in gains],
            "arrayminus": [rate - low for _, rate, low, _ in gains],
            "thickness": 1,
        },
        "line": {"color": BLUE},
    }
    axis = {"title": {"text": "nats a FLOP"}, "exponentformat": "e"}
    return {"data": [line], "layout": {"xaxis": AXIS, "yaxis": axis, "margin": {"t": 20}}}


def _causes(causes: Table) -> dict[str, Any]:
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [row[1] for row in causes.rows],
        "y": [safe(str(row[0])) for row in causes.rows],
        "marker": {"color": BLUE},
    }
    axes = {"xaxis": {"title": {"text": "FLOPs"}, "exponentformat": "e"}, "yaxis": {"autorange": "reversed"}}
    return {"data": [bars], "layout": {**axes, "margin": {"t": 20}}}


def draw(path: Path, state: State, band: Band | None, made: Sequence[Mark], causes: Table, metric: str) -> None:
    """Write the picture: the loss with band and decisions, and FLOPs by cause."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.8), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    if band is not None:
        left.fill_between(band.flops_G, band.low_G, band.high_G, color=GREEN, alpha=0.18, linewidth=0)
        left.plot(band.flops_G, band.middle_G, "--", color=GREEN, label="fitted, 80 %")
    for segment in range(state.last_segment + 1):
        points = state.segment(segment)
        values = [_value(state, point) for point in points]
        left.plot([point.flops for point in points], values, "o-", color=BLUE if segment % 2 else GREY, markersize=3)
    for mark in made:
        place = (mark.flops, float(mark.loss or 0.0))
        left.scatter(*place, color=ORANGE, marker="D", zorder=3)
        left.annotate(mark.action, place, xytext=(4, 6), textcoords="offset points", fontsize=8)
    left.set(xlabel="FLOPs of training", ylabel=metric.replace("_", " "))
    if band is not None:
        left.legend()
    right.barh(
        [str(row[0]) for row in causes.rows][::-1], [float(row[1] or 0) for row in causes.rows][::-1], color=BLUE
    )
    right.set(xlabel="FLOPs", title="by cause")
    figure.savefig(path, format="png")
