"""A stage's summary as a page: one value (`Summary`) turned into markdown for Prefect.

Artifacts are small and keyed by pipeline, so that Prefect shows one history of plans, decisions and verdicts.
"""

from __future__ import annotations

import re

from prefect.artifacts import create_markdown_artifact

from data_contracts.cost import Cost
from data_contracts.records import Summary, Table
from flows.readable import duration, size, text

SHOWN = ("plan", "govern", "weigh", "quote", "judge")
"""The stages whose summary becomes a Prefect artifact: the plan, each decision, what pays, a quote, the verdict."""


def markdown(summary: Summary, costs: dict[str, Cost] | None = None) -> str:
    """Return the summary, and what it cost by cause, as a markdown page."""
    lines = [f"# {_cell(summary.title)}", ""]
    facts = {**summary.facts, **summary.measured}
    if facts:
        lines += ["| | |", "|---|---|", *(f"| {_cell(name)} | {_cell(text(facts[name]))} |" for name in facts), ""]
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


def publish(pipeline: str, verb: str, name: str, summary: Summary, costs: dict[str, Cost]) -> None:
    """Make the Prefect artifact of a stage call, where its stage is one of `SHOWN`."""
    if verb in SHOWN:
        create_markdown_artifact(markdown(summary, costs), key=artifact_key(pipeline, verb), description=name)
