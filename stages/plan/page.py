"""What a user sees of a plan: one page beside the record, outside its digest.

`plan.html` draws the bytes of each phase as stacked bars, what earlier segments of the run really took beside them, and
every way that was priced by bytes and speed, with the Pareto front. One file that needs no network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from data_contracts.arrow import read_table
from data_contracts.records import Plan, Summary
from stages.page.html import Part, safe, write_page
from stages.page.points import BLUE, GREEN, GREY, ORANGE
from stages.plan.report import alternatives, phases_of
from stages.plan.search import Way, front
from stages.stage import Artifact, Work

PAGE, TIMING = "plan.html", "timing.arrow"
PARTS = (("process", GREY), ("weights", BLUE), ("moments", "#6f4fa0"), ("gradients", GREEN), ("activations", ORANGE))
GIB = 2**30


def show(
    plan: Plan, chosen: Way, ways: Sequence[Way], curves: Iterable[Artifact], summary: Summary, work: Work
) -> None:
    """Write the page of the output `plan`; `curves` are of the run's segments so far."""
    measured = measured_peaks(curves)
    note = "Predicted for the longest row; the largest phase is the peak."
    if measured:
        note += f" Measured: {len(measured)} segment(s) trained so far, planned by an earlier plan of this run."
    parts = [
        Part("Bytes held, by phase of a step", note, figure=_bars(chosen, measured), table=phases_of(chosen)),
        Part("Ways by bytes and speed", "Speed is modelled, not timed.", figure=_scatter(ways, chosen)),
        Part("Ways considered", table=alternatives(plan)),
    ]
    write_page(work.measured("plan", PAGE), summary.title, summary.facts, parts)


def measured_peaks(curves: Iterable[Artifact]) -> list[int]:
    """Return the most memory that each segment's steps held: the process's resident size, or what CUDA allocated."""
    found = []
    for curve in curves:
        path = curve.measured(TIMING)
        if path.is_file():
            timing: pa.Table = read_table(path)
            steps = [row["peak_bytes"] for row in timing.to_pylist() if row["what"] == "step"]
            found += [max(steps)] if steps else []
    return found


def _bars(chosen: Way, measured: Sequence[int]) -> dict[str, Any]:
    names = [*chosen.phases, *(f"measured {number}" for number in range(1, len(measured) + 1))]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": part,
            "x": list(chosen.phases),
            "y": [getattr(phase, part) / GIB for phase in chosen.phases.values()],
            "marker": {"color": colour},
        }
        for part, colour in PARTS
    ]
    if measured:
        data.append(
            {
                "type": "bar",
                "name": "measured",
                "x": names[len(chosen.phases) :],
                "y": [size / GIB for size in measured],
                "marker": {"color": "#1d2329"},
            }
        )
    if chosen.allowed_bytes is not None:
        allowed = chosen.allowed_bytes / GIB
        data.append({"type": "scatter", "mode": "lines", "name": "allowed", "x": names, "y": [allowed] * len(names),
                     "line": {"color": "#b3261e", "dash": "dash"}})  # fmt: skip
    return {"data": data, "layout": {"barmode": "stack", "yaxis": {"title": {"text": "GiB"}}, "margin": {"t": 20}}}


def _scatter(ways: Sequence[Way], chosen: Way) -> dict[str, Any]:
    def points(name: str, some: Sequence[Way], **style: Any) -> dict[str, Any]:
        return {
            "type": "scatter",
            "name": name,
            "x": [way.peak_bytes / GIB for way in some],
            "y": [way.tokens_per_second for way in some],
            "text": [safe(way.name) for way in some],
            **style,
        }

    data = [
        points("fits", [way for way in ways if way.fits], mode="markers", marker={"color": BLUE}),
        points("does not fit", [way for way in ways if not way.fits], mode="markers", marker={"color": GREY}),
        points("Pareto front", front(ways), mode="lines", line={"color": GREEN}),
        points("chosen", [chosen], mode="markers", marker={"color": ORANGE, "size": 14, "symbol": "star"}),
    ]
    axes = {"xaxis": {"title": {"text": "peak, GiB"}}, "yaxis": {"title": {"text": "modelled tokens a second"}}}
    return {"data": data, "layout": {**axes, "margin": {"t": 20}}}
