"""Judge: from evidence to a verdict. Pure: the same evidence gives the same verdict, and nothing outside changes.

It also looks for the holdout in what was trained on, and writes every meeting down. Moving an alias is `promote`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from data_contracts.config import JudgeConfig
from data_contracts.cost import Frozen
from data_contracts.method import Method
from data_contracts.records import Summary
from stages.stage import Inputs, Stage, Takes, Work


class JudgeSlice(Frozen):
    """What judging reads of the configuration."""

    judge: JudgeConfig = JudgeConfig()


class Judge(Stage[JudgeSlice]):
    """Evaluation, selections and examples to a verdict and a contamination table."""

    verb: ClassVar[str] = "judge"
    config: ClassVar[type[Frozen]] = JudgeSlice
    takes: ClassVar[Mapping[str, Takes]] = {
        "evaluation": Takes("evaluation"),
        "candidate": Takes("checkpoint", optional=True),
        "champion": Takes("checkpoint", optional=True),
        "selection": Takes("selection", many=True),
        "pool": Takes("examples"),
        "target": Takes("examples", optional=True),
        "holdout": Takes("examples"),
    }
    gives: ClassVar[Mapping[str, str]] = {"verdict": "verdict", "contamination": "contamination"}

    def chosen(self, config: JudgeSlice) -> Iterable[tuple[type[Method], Mapping[str, Any], str]]:
        """Return the configured gates."""
        from stages.judge.gate import Gate

        return [(Gate, settings, f"judge.gates[{i}]") for i, settings in enumerate(config.judge.gates)]

    def run(self, config: JudgeSlice, inputs: Inputs, work: Work) -> Summary:
        """Judge; see `engine.judge`."""
        from stages.judge.engine import judge

        return judge(config.judge, inputs, work)


STAGE = Judge()
