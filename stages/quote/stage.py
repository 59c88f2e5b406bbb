"""Quote what a run is expected to come to: the chance that choosing pays, loss, FLOPs and hours, with intervals.

Everything is read from what other stages made: the plan, the decision after the warm-up, what words tell of a choice,
and short trainings ("probes") that were weighed against each other. Trains nothing; tells what is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from data_contracts.config import AutoConfig, BudgetConfig, GovernConfig, ScoreConfig, SelectConfig
from data_contracts.cost import Frozen
from data_contracts.method import Method
from data_contracts.records import Summary
from stages.stage import Inputs, Stage, Takes, Work


class QuoteSlice(Frozen):
    """What quoting reads of the configuration: `auto.arms` are the ways that are quoted, chance first, then those of
    which words tell, in the order of their likenesses; `score` and `select` say which of them a run takes."""

    budget: BudgetConfig
    score: ScoreConfig
    select: SelectConfig
    govern: GovernConfig
    auto: AutoConfig


class QuoteStage(Stage[QuoteSlice]):
    """Plan, decision, words and probes to a quote."""

    verb: ClassVar[str] = "quote"
    config: ClassVar[type[Frozen]] = QuoteSlice
    takes: ClassVar[Mapping[str, Takes]] = {
        "plan": Takes("plan"),
        "decision": Takes("decision", optional=True),
        "weighing": Takes("weighing", optional=True),  # of the race that a run makes too
        "trial": Takes("weighing", optional=True),  # of probes that a run does not make
        "curve": Takes("curve", many=True, optional=True),  # the warm-up's, then each probe's
        "likeness": Takes("likeness", many=True, optional=True),
        "holdout_tokens": Takes("tokens", optional=True),
    }
    gives: ClassVar[Mapping[str, str]] = {"quote": "quote"}
    reads_ledger: ClassVar[bool] = True

    def chosen(self, config: QuoteSlice) -> Iterable[tuple[type[Method], Mapping[str, Any], str]]:
        """Return the configured policy: it says from where on a run is ended."""
        from stages.governor.policy import Policy

        return [(Policy, config.govern.policy, "govern.policy")]

    def external(self, config: QuoteSlice, root: Path) -> dict[str, Any]:
        """Return the slice without the price, unless it says what a limit in money is worth: else money is asked when a
        quote is shown."""
        priced = config.budget.money is not None
        return config.model_dump(mode="json", exclude=None if priced else {"budget": {"price"}})

    def run(self, config: QuoteSlice, inputs: Inputs, work: Work) -> Summary:
        """Write the quote, its hours and its page."""
        from stages.quote.engine import write_quote

        return write_quote(config, inputs, work)


STAGE = QuoteStage()
