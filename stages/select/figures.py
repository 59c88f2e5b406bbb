"""What a user sees of a selection: one picture and one page beside the table, outside its digest.

`selection.png` holds composition by length, gains and the first map; `selection.html` all of it, interactive, with
texts, in one file that needs no network (`stages/page/html.py`). Texts come from the `examples` given; without them
both are made all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from data_contracts.records import Summary, Table
from stages.page.html import Part, safe, write_page
from stages.page.points import BLUE, GREEN, GREY, ORANGE, spread
from stages.select.map import Plane, Points, planes_of, points_of
from stages.select.view import SOURCES_SHOWN, Viewed, by_group, by_length, by_source, coverage, nearest_rejected
from stages.stage import Inputs, Work
from stages.text.examples import beginning, text_of

PICTURE, PAGE = "selection.png", "selection.html"
COLOURS = {"pool": GREY, "dropped as noise": ORANGE, "chosen": BLUE, "target": GREEN}
MOST_GAINS = 1000


def show(viewed: Viewed, summary: Summary, inputs: Inputs, work: Work) -> tuple[Table, ...]:
    """Draw picture and page of the output `selection`; return the tables that the stage's summary holds too."""
    examples = inputs.maybe("pool")
    points = points_of(viewed, examples, inputs.maybe("target"), work.rng("map"))
    planes = planes_of(viewed, points)
    compositions = [table for table in (by_source(viewed), by_length(viewed), by_group(viewed)) if table is not None]
    covered = coverage(viewed)
    texts = None if examples is None else examples.table()
    near = _near(viewed, lambda example_id: "" if texts is None else beginning(text_of(texts, example_id)))
    parts = [Part(table.title, figure=_bars(table), table=table) for table in compositions]
    parts += [Part(covered.title, table=covered)] if covered is not None else []
    gain = gains(viewed)
    if len(gain[0]):
        note = "What each row added to the selector's objective when it was chosen."
        parts.append(Part("Gain by rank", note, figure=_lines(*gain)))
    for plane in planes:
        note = f"{plane.note}. Shown: {points.sampled(plane.point_M)}; where not all, a sample drawn by the seed."
        parts.append(Part(plane.title, note, figure=_scatter(plane, points, viewed), tall=True))
        if plane.alike:
            alike = _alike(plane, points)
            parts.append(Part(alike.title, table=alike))
    parts += [Part(near.title, table=near)] if near is not None else []
    parts += [Part(table.title, table=table) for table in summary.tables if table.title == "First rows"]
    write_page(work.measured("selection", PAGE), summary.title, summary.facts, parts)
    draw(work.measured("selection", PICTURE), compositions, gain, planes, points)
    return tuple(table for table in (*compositions[1:], covered, near) if table is not None)


def gains(viewed: Viewed) -> tuple[np.ndarray, np.ndarray]:
    """Return (ranks, gains) of at most `MOST_GAINS` chosen rows, at equal steps; empty where a selector has none."""
    rank = spread(np.flatnonzero(np.isfinite(viewed.gain_S)), MOST_GAINS)
    return rank, viewed.gain_S[rank]


def draw(
    path: Path, compositions: list[Table], gain: tuple[np.ndarray, np.ndarray], planes: list[Plane], points: Points
) -> None:
    """Write the picture: composition by source or length, gains, and the first map, as far as there are."""
    from matplotlib.figure import Figure

    table = next((table for table in compositions if table.columns[0] == "length"), compositions[0])
    count = 1 + bool(len(gain[0])) + bool(planes)
    figure = Figure(figsize=(4.6 * count, 3.8), dpi=110, layout="constrained")
    axes = iter(figure.subplots(1, count, squeeze=False)[0])
    axis = next(axes)
    names, pool, taken = _shares(table)
    place = np.arange(len(names))
    axis.barh(place + 0.2, pool, height=0.4, color=GREY, label="pool")
    axis.barh(place - 0.2, taken, height=0.4, color=BLUE, label="chosen")
    axis.set_yticks(place, [_plain(name) for name in names])
    axis.set(xlabel="share of rows", title=table.title)
    axis.legend()
    if len(gain[0]):
        axis = next(axes)
        axis.plot(*gain, color=BLUE)
        axis.set(xlabel="rank", ylabel="gain", title="Gain by rank")
    if planes:
        axis, plane = next(axes), planes[0]
        for kind, colour in COLOURS.items():
            mine = points.kind_M[plane.point_M] == kind
            if mine.any():
                axis.scatter(*plane.place_M2[mine].T, s=6, alpha=0.6, color=colour, linewidths=0, label=kind)
        axis.set(xlabel=plane.axes[0], ylabel=plane.axes[1], title=plane.title)
        axis.legend()
    figure.savefig(path, format="png")


def _plain(name: Any) -> str:
    """Return a name as matplotlib may show it: short, and with no formula in it."""
    return beginning(str(name), 28).replace("$", r"\$")


def _shares(table: Table) -> tuple[list[Any], np.ndarray, np.ndarray]:
    names, pool, taken = zip(*table.rows, strict=True)
    pool_R, taken_R = np.array(pool, dtype=np.float64), np.array(taken, dtype=np.float64)
    return list(names), pool_R / max(pool_R.sum(), 1), taken_R / max(taken_R.sum(), 1)


def _bars(table: Table) -> dict[str, Any]:
    names, pool, taken = _shares(table)
    first = slice(SOURCES_SHOWN)  # without the line of all others
    names, pool, taken = names[first], pool[first], taken[first]
    shown, short = [safe(str(name)) for name in names], [safe(beginning(str(name), 40)) for name in names]
    horizontal = {"type": "bar", "orientation": "h"}
    bars = [
        {"name": name, "y": shown, "x": share.round(4).tolist(), "marker": {"color": colour}, **horizontal}
        for name, share, colour in (("pool", pool, GREY), ("chosen", taken, BLUE))
    ]
    down = {"type": "category", "autorange": "reversed", "automargin": True, "tickvals": shown, "ticktext": short}
    layout = {"barmode": "group", "xaxis": {"title": {"text": "share of rows"}}, "yaxis": down}
    return {"data": bars, "layout": {**layout, "margin": {"t": 20}}}


def _lines(rank: np.ndarray, gain: np.ndarray) -> dict[str, Any]:
    axes = {"xaxis": {"title": {"text": "rank"}}, "yaxis": {"title": {"text": "gain"}}}
    line = {"type": "scatter", "mode": "lines", "x": rank.tolist(), "y": gain.tolist(), "line": {"color": BLUE}}
    return {"data": [line], "layout": {**axes, "margin": {"t": 20}}}


def _scatter(plane: Plane, points: Points, viewed: Viewed) -> dict[str, Any]:
    kind_M, traces = points.kind_M[plane.point_M], []
    for kind, colour in COLOURS.items():
        mine = np.flatnonzero(kind_M == kind)
        if not len(mine):
            continue
        hover = [_hover(points, point, viewed) for point in plane.point_M[mine].tolist()]
        place = plane.place_M2[mine]
        marker = {"color": colour, "size": 6, "opacity": 0.65}
        shared = {"type": "scatter", "mode": "markers", "name": kind, "hoverinfo": "text", "marker": marker}
        x, y = ([float(f"{value:.5g}") for value in place[:, axis]] for axis in (0, 1))
        traces.append({**shared, "x": x, "y": y, "text": hover})
    axes = {name: {"title": {"text": label}} for name, label in zip(("xaxis", "yaxis"), plane.axes, strict=True)}
    return {"data": traces, "layout": {**axes, "hovermode": "closest", "margin": {"t": 20}}}


def _hover(points: Points, point: int, viewed: Viewed) -> str:
    lines = [f"{points.kind_M[point]} {points.ids[point]}"]
    row = int(points.row_M[point])
    if points.kind_M[point] != "target":
        lines.append(str(viewed.pool.sources[row].as_py()))
        if viewed.pool.score_N is not None:
            lines.append(f"score {viewed.pool.score_N[row]:.4g}")
    return "<br>".join(safe(line) for line in (*lines, points.said(point)) if line)


def _alike(plane: Plane, points: Points) -> Table:
    rows = tuple(
        (round(cosine, 4), points.ids[left], points.said(left), points.ids[right], points.said(right))
        for left, right, cosine in plane.alike
    )
    what = plane.title.removeprefix("Map of ")
    return Table(
        title=f"Most alike among the chosen, by {what}",
        columns=("cosine", "one", "its text", "other", "its text "),
        rows=rows,
    )


def _near(viewed: Viewed, text: Any) -> Table | None:
    rows = nearest_rejected(viewed).tolist()
    if not rows:
        return None
    assert viewed.pool.score_N is not None
    shown = []
    for row in rows:
        example_id = str(viewed.pool.ids[row].as_py())
        score, source = float(f"{viewed.pool.score_N[row]:.6g}"), str(viewed.pool.sources[row].as_py())
        shown.append((score, example_id, source, text(example_id)))
    return Table(
        title="Nearest rejected: the best by score that were not chosen",
        columns=("score", "example_id", "source", "text"),
        rows=tuple(shown),
    )
