"""Promote: the one effect of the pipeline. Registers the candidate and moves the alias, or says why nothing moved.

Never adopted from a commit, and idempotent: doing it again finds the alias where it should be. The verdict alone
decides whether; this stage checks that verdict, candidate and evaluation belong together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from data_contracts.config import PromoteConfig
from data_contracts.cost import Frozen
from data_contracts.records import Summary
from stages.stage import Inputs, Stage, Takes, Work


class PromoteSlice(Frozen):
    """What promoting reads of the configuration."""

    promote: PromoteConfig = PromoteConfig()


class Promote(Stage[PromoteSlice]):
    """Verdict and candidate to a promotion record; the alias is moved under a check."""

    verb: ClassVar[str] = "promote"
    config: ClassVar[type[Frozen]] = PromoteSlice
    takes: ClassVar[Mapping[str, Takes]] = {
        "verdict": Takes("verdict"),
        "candidate": Takes("checkpoint", optional=True),
        "base": Takes("base"),
        "evaluation": Takes("evaluation"),
        "plan": Takes("plan", optional=True),
    }
    gives: ClassVar[Mapping[str, str]] = {"promotion": "promotion"}
    effect: ClassVar[bool] = True
    reads_ledger: ClassVar[bool] = True

    def run(self, config: PromoteSlice, inputs: Inputs, work: Work) -> Summary:
        """Promote or not; see `effect.promote`."""
        from stages.promote.effect import promote

        return promote(config.promote, inputs, work)


STAGE = Promote()
