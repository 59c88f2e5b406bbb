"""A stage's summary as a page: one value (`Summary`) turned into markdown for Prefect, with the stage's picture in it.

Artifacts are keyed by pipeline, so that Prefect shows one history of plans, decisions and verdicts. A picture is some
tens of kilobytes; Prefect's page shows images that the markdown itself holds.
"""

from __future__ import annotations

import re
from base64 import b64encode
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from data_contracts.cost import Cost
from data_contracts.records import Result, Summary, Table
from data_contracts.store import Store
from flows.readable import duration, size, text

SHOWN = ("plan", "govern", "weigh", "quote", "judge")
"""The stages whose summary becomes a Prefect artifact: the plan, each decision, what pays, a quote, the verdict."""


def markdown(summary: Summary, costs: dict[str, Cost] | None = None, picture: bytes | None = None) -> str:
    """Return the summary, its picture (PNG), and what it cost by cause, as a markdown page."""
    lines = [f"# {_cell(summary.title)}", ""]
    facts = {**summary.facts, **summary.measured}
    if facts:
        lines += ["| | |", "|---|---|", *(f"| {_cell(name)} | {_cell(text(facts[name]))} |" for name in facts), ""]
    if picture is not None:
        lines += [f"![{_cell(summary.title)}](data:image/png;base64,{b64encode(picture).decode()})", ""]
    for table in summary.tables:
        lines += _table(table)
    lines += [f"> {_cell(notice)}" for notice in summary.notices]
    if costs:
        rows = tuple(
            (cause, cost.flops, cost.tokens, duration(cost.seconds), size(cost.peak_bytes))
            for cause, cost in sorted(costs.items())
        )
        lines += _table(Table(title="Cost", columns=("cause", "FLOPs", "tokens", "time", "peak memory"), rows=rows))
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table) -> list[str]:
    head = "| " + " | ".join(_cell(column) for column in table.columns) + " |"
    rows = ["| " + " | ".join(_cell(text(value)) for value in row) + " |" for row in table.rows]
    return [f"## {_cell(table.title)}", "", head, "|" + "---|" * len(table.columns), *rows, ""]


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")


def artifact_key(pipeline: str, verb: str) -> str:
    """Return a key of lower-case letters, digits and dashes, which is all that Prefect takes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{pipeline}-{verb}".lower()).strip("-")


def publish(pipeline: str, name: str, result: Result, store: Store) -> None:
    """Make the Prefect artifact of a stage call, where its stage is one of `SHOWN`.

    A stage's picture lies beside one of its outputs and is called as the stage is.
    """
    if result.stage not in SHOWN:
        return
    manifest, picture = store.read_manifest(result.run), f"{result.stage}.png"
    places = [
        store.measured(output.ref) / picture
        for output in manifest.outputs.values()
        if any(Path(entry.path).name == picture for entry in output.measured)
    ]
    page = markdown(manifest.summary, result.costs, places[0].read_bytes() if places else None)
    create_markdown_artifact(page, key=artifact_key(pipeline, result.stage), description=name)
