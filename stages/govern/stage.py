"""Decide what a run does next, from its curves, its ledger and what is left of its budget.

The policy decides (`stages/governor`); this stage gives it the state and the budget, enforces the number of rounds,
says what the next segment may spend, and names the best checkpoint so far. Equal curves and FLOPs give equal decisions;
wall time enters only where the budget sets seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from data_contracts.arrow import read_table
from data_contracts.config import BudgetConfig, GovernConfig, TrainConfig
from data_contracts.cost import Frozen
from data_contracts.method import Method
from data_contracts.records import Decision, MemoryUse, Plan, Summary, Weighing
from stages.governor.drift import agreement, shared_rows
from stages.governor.reallocation import uses_of
from stages.governor.state import Drift
from stages.stage import Artifact, Inputs, Stage, Takes, Work

CHOICES = "choices.arrow"
"""Beside a curve: what the policy chose after each evaluation inside its segment."""


class GovernSlice(Frozen):
    """What governing reads of the configuration."""

    budget: BudgetConfig
    govern: GovernConfig
    train: TrainConfig


class Govern(Stage[GovernSlice]):
    """Curves, checkpoints, plan and the previous decision to the next decision."""

    verb = "govern"
    config = GovernSlice
    takes = {  # noqa: RUF012 - a declaration
        "curve": Takes("curve", many=True),
        "checkpoint": Takes("checkpoint", many=True),
        "plan": Takes("plan"),
        "decision": Takes("decision", optional=True),
        "scores": Takes("scores", optional=True),  # made for the latest segment, with those before them
        "earlier_scores": Takes("scores", optional=True),
        "target_tokens": Takes("tokens", optional=True),  # with the one that the latest selection was made for
        "earlier_target": Takes("tokens", optional=True),
        "mixture": Takes("mixture", optional=True),  # in force, where it follows training
        "weighing": Takes("weighing", optional=True),  # what was tried before the latest segment is charged with it
    }
    gives = {"decision": "decision"}  # noqa: RUF012
    reads_ledger = True

    def chosen(self, config: GovernSlice) -> Iterable[tuple[type[Method], Mapping[str, Any], str]]:
        """Return the configured policy."""
        from stages.governor.policy import Policy

        return [(Policy, config.govern.policy, "govern.policy")]

    def run(self, config: GovernSlice, inputs: Inputs, work: Work) -> Summary:
        """Write the decision, and a page and a picture of the run's course beside it."""
        from stages.govern.decide import decide
        from stages.govern.outlook import (
            Outlook,
            ahead,
            by_cause,
            decisions,
            expected,
            forgetting,
            marginal,
            marks,
            segments,
        )
        from stages.govern.page import show

        given, tried, spent = inputs.maybe("decision"), inputs.maybe("weighing"), work.spent()
        previous = given.record(Decision) if given else None
        decision, state = decide(
            config,
            [artifact.table() for artifact in inputs.all("curve")],
            [artifact.ref for artifact in inputs.all("checkpoint")],
            inputs.one("plan").record(Plan),
            previous,
            spent,
            drift=drift_of(inputs, previous),
            use=latest_use(inputs.all("curve")),
            weighing=tried.record(Weighing) if tried else None,
            remixes=inputs.maybe("mixture") is not None,
        )
        work.record("decision", decision)
        left = decision.numbers["spendable_flops"]
        outlook = Outlook.of(state, int(left) if left is not None else decision.segment_flops)
        bought = outlook.buys(outlook.left)
        facts: dict[str, str | int | float | bool | None] = {
            "action": decision.action,
            "reason": decision.reason,
            "round": decision.round,
            "best validation loss": decision.best_loss,
            "best step": decision.best_step,
            "next segment FLOPs at most": decision.segment_flops,
            "remaining FLOPs": decision.remaining.flops,
            "what binds": decision.numbers["binding"],
            "direction": decision.direction,
        }
        if bought is not None:
            facts["all that is left would bring"] = "{:.3g} nats, {:.3g} to {:.3g} at 80 %".format(*bought)
        facts |= forgetting(state)
        if decision.best is None and state.best is not None:
            work.notice("every checkpoint has forgotten more than is allowed: the run keeps none, and the base stands")
        if decision.non_finite_steps:
            facts["steps with a non-finite loss"] = ", ".join(map(str, decision.non_finite_steps))
        made = marks(decision, state, [choice for curve in inputs.all("curve") for choice in chosen_inside(curve)])
        summary = Summary(
            title=f"govern: {decision.action}",
            facts=facts,
            tables=(
                segments(state),
                ahead(outlook),
                marginal(outlook),
                decisions(made),
                expected(outlook, decision),
                by_cause(spent),
            ),
        )
        show(outlook, made, config.govern.metric, summary, work)
        return summary


def drift_of(inputs: Inputs, previous: Decision | None) -> Drift | None:
    """Return what has moved under the latest selection, from targets and scorings; None where neither was given."""
    earlier, before = inputs.maybe("earlier_target"), inputs.maybe("earlier_scores")
    shared = None if earlier is None else shared_rows(inputs.one("target_tokens").table(), earlier.table())
    found = None if before is None else agreement(before.table(), inputs.one("scores").table())
    if shared is None and found is None:
        return None
    value, rows = found or (None, 0)
    return Drift(shared, value, rows, previous is not None and previous.numbers.get("drift") is True)


def latest_use(curves: Sequence[Artifact]) -> MemoryUse | None:
    """Return what the latest segment held; None where it did not say."""
    return next(iter(uses_of(curves[-1:])), None)


def chosen_inside(curve: Artifact) -> list[tuple[int, str, str]]:
    """Return (step, action, reason) of each choice that a policy made inside a segment; none where none was asked."""
    path = curve.measured(CHOICES)
    if not path.is_file():
        return []
    return [(row["step"], row["action"], row["reason"]) for row in read_table(path).to_pylist()]


STAGE = Govern()
