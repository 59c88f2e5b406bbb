"""Ask base, champion and candidate the same questions on the holdout.

The holdout is touched here and by contamination checks only. The outcome is a table of items, not of means: gates
compare models pair by pair. This module is light: torch is loaded inside `run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from data_contracts.config import EvaluateConfig
from data_contracts.cost import Frozen
from data_contracts.method import Method
from data_contracts.records import Summary
from stages.stage import Inputs, Stage, Takes, Work


class EvaluateSlice(Frozen):
    """What evaluating reads of the configuration."""

    seed: int
    evaluate: EvaluateConfig = EvaluateConfig()


class Evaluate(Stage[EvaluateSlice]):
    """Per-item outcomes of every model on every task."""

    verb: ClassVar[str] = "evaluate"
    config: ClassVar[type[Frozen]] = EvaluateSlice
    takes: ClassVar[Mapping[str, Takes]] = {
        "base": Takes("base"),
        "holdout": Takes("examples"),
        "holdout_tokens": Takes("tokens"),
        "checkpoint": Takes("checkpoint", optional=True),
        "champion": Takes("checkpoint", optional=True),
        "champion_base": Takes("base", optional=True),
    }
    gives: ClassVar[Mapping[str, str]] = {"evaluation": "evaluation"}

    def chosen(self, config: EvaluateSlice) -> Iterable[tuple[type[Method], Mapping[str, Any], str]]:
        """Return the configured tasks."""
        from stages.evaluate.task import Task

        return [(Task, settings, f"evaluate.tasks[{i}]") for i, settings in enumerate(config.evaluate.tasks)]

    def run(self, config: EvaluateSlice, inputs: Inputs, work: Work) -> Summary:
        """Evaluate; see `engine.evaluate_models`."""
        from stages.evaluate.engine import evaluate_models

        return evaluate_models(config.evaluate, inputs, work)


STAGE = Evaluate()
