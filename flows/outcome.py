"""What came of a pipeline run: its steps, costs, decisions and verdict, in a few kilobytes.

It is what the pipeline flow returns and what the final summary is written from. Everything in it was committed by a
stage; nothing is computed here.
"""

from __future__ import annotations

from pydantic import Field

from data_contracts.cost import Cost, Frozen
from data_contracts.ledger import Ledger
from data_contracts.records import Decision, Plan, Promotion, Ref, Summary, Verdict


class Step(Frozen):
    """One stage call: what it was called, which attempt answered, and what that attempt had spent."""

    name: str
    stage: str
    run: str = Field(description="MLflow run of the attempt.")
    cached: bool
    costs: dict[str, Cost] = Field(description="By cause, as in the manifest.")
    refs: dict[str, Ref]

    @property
    def cost(self) -> Cost:
        """All causes together."""
        total = Cost()
        for cost in self.costs.values():
            total += cost
        return total


class Outcome(Frozen):
    """A finished pipeline run."""

    run: str = Field(description="MLflow run of the pipeline run.")
    name: str
    seconds: float = Field(ge=0, description="Wall time of this run, what was reused included at no cost.")
    steps: tuple[Step, ...]
    ledger: Ledger = Field(description="By stage and cause, of everything that the result descends from.")
    amortised: Cost = Field(
        Cost(),
        description="The same, each attempt at its part a user: configurations whose runs were given its result.",
    )
    decisions: tuple[Decision, ...]
    plan: Plan
    selection: Summary | None = Field(description="What the last selection said; None where none was made.")
    weighing: Summary | None = Field(None, description="What trying ways of choosing said; None where none were tried.")
    evaluation: Summary
    verdict: Verdict
    promotion: Promotion

    @property
    def reused(self) -> int:
        """How many stage calls were answered by a commit."""
        return sum(step.cached for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        """The largest memory that an attempt held at one moment."""
        return max((step.cost.peak_bytes for step in self.steps), default=0)
