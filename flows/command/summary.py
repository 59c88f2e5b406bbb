"""The summary that ends a run: what was gained, what it cost, what was decided, and where to look.

Everything shown was committed by a stage; nothing is computed here but sums.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from data_contracts.cost import Cost, Price
from data_contracts.records import Table
from flows.command.screen import console, rich_table
from flows.outcome import Outcome
from flows.readable import duration, size, text
from flows.workspace import Workspace

COLOURS = {"promote": "green", "hold": "yellow", "reject": "red"}


def show_outcome(outcome: Outcome, workspace: Workspace) -> None:
    """Print the summary of a finished run."""
    out = console()
    out.print(rich_table(steps_table(outcome)))
    out.print(rich_table(decisions_table(outcome)))
    if outcome.weighing is not None:
        for table in outcome.weighing.tables:
            out.print(rich_table(table))
        out.print(Text(str(outcome.weighing.facts["reason"])))
    if outcome.selection is not None:
        for table in outcome.selection.tables[:1]:  # the mixture: how much of each part was chosen
            out.print(rich_table(table))
    for table in outcome.evaluation.tables:
        out.print(rich_table(table))
    out.print(rich_table(gates_table(outcome)))
    out.print(rich_table(costs_table(outcome.ledger.by_cause(), "cause", workspace.config.budget.price)))
    price, ran = workspace.config.budget.price, [step for step in outcome.steps if not step.cached]
    spent_now = sum(step.cost.flops for step in ran)
    lines = {
        "plan": outcome.plan.why,
        "FLOPs": spent_line(outcome.ledger.total.flops, spent_now, outcome.amortised.flops, "spent in this run"),
        "peak memory": size(outcome.peak_bytes),
        "time": f"{duration(outcome.seconds)}, {outcome.reused} of {len(outcome.steps)} stages reused",
    }
    if price is not None:
        paid_now = sum(price.of(step.stage, step.cost).money for step in ran)
        total = outcome.ledger.total.money
        lines["money"] = f"{price.currency} {spent_line(total, paid_now, outcome.amortised.money, 'in this run')}"
    for name, value in lines.items():
        out.print(Text(f"{name:<14} {value}"))
    verdict = outcome.verdict
    out.print(Text(f"{'verdict':<14} {verdict.outcome}: {verdict.reason}", style=COLOURS[verdict.outcome]))
    out.print(Text(f"{'promotion':<14} {outcome.promotion.outcome}: {outcome.promotion.reason}"))
    config = workspace.shown(workspace.file)
    store = workspace.config.store.tracking_uri or workspace.shown(workspace.home)
    out.print(Text(f"{'look':<14} lazytrain status --config {config}   ·   lazytrain ui --config {config}"))
    out.print(Text(f"{'':<14} run {outcome.run[:12]} in {store}"))


def spent_line(total: float, now: float, amortised: float, what: str) -> str:
    """Return what all that a run descends from cost, what was spent now and, where it differs, its amortised part."""
    told = f"{text(total)} in all, {text(now)} {what}"
    return told if amortised == total else f"{told}, {text(amortised)} amortised over the runs that share it"


def steps_table(outcome: Outcome) -> Table:
    """Return what each stage call cost."""
    rows = tuple(
        (
            step.name,
            "reused" if step.cached else "ran",
            step.cost.flops,
            step.cost.tokens,
            duration(step.cost.seconds),
            size(step.cost.peak_bytes),
        )
        for step in outcome.steps
    )
    return Table(title="Stages", columns=("stage", "", "FLOPs", "tokens", "time", "peak memory"), rows=rows)


def costs_table(costs: Mapping[str, Cost], what: str, price: Price | None) -> Table:
    """Return costs by stage or by cause; money where there is a price."""
    columns = (what, "FLOPs", "tokens", "time", "peak memory", *([price.currency] if price else []))
    rows = tuple(
        (
            name,
            cost.flops,
            cost.tokens,
            duration(cost.seconds),
            size(cost.peak_bytes),
            *([round(cost.money, 4)] if price else []),
        )
        for name, cost in costs.items()
    )
    return Table(title=f"Costs by {what}", columns=columns, rows=rows)


def decisions_table(outcome: Outcome) -> Table:
    """Return the governor's decisions, in order."""
    rows = tuple((item.round, item.action, item.best_loss, item.reason) for item in outcome.decisions)
    return Table(title="Decisions", columns=("round", "action", "best validation loss", "reason"), rows=rows)


def gates_table(outcome: Outcome) -> Table:
    """Return what each gate found."""
    rows = tuple((item.gate, "passed" if item.passed else "failed", item.reason) for item in outcome.verdict.findings)
    return Table(title="Gates", columns=("gate", "", "finding"), rows=rows)
