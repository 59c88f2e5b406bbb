"""Plan how training fits: technique, micro-batch, precision and recomputation, and what a segment will cost.

Nothing is loaded or trained: the step is traced without data. A plan is made from the longest row, not the mean; after
the warm-up, and where the governor reallocates, it is made again with the measured gradient noise and what segments
held; a checkpoint's technique stays, or gives way to `full` where that is preferred and now fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from data_contracts.config import BudgetConfig, PlanConfig, TrainConfig
from data_contracts.cost import Frozen
from data_contracts.method import Method, name_in, resolve
from data_contracts.records import Summary
from stages.stage import Inputs, Stage, Takes, Work


class PlanSlice(Frozen):
    """What planning reads of the configuration."""

    seed: int
    budget: BudgetConfig
    plan: PlanConfig
    train: TrainConfig


class PlanStage(Stage[PlanSlice]):
    """Model and token lengths to a plan."""

    verb: ClassVar[str] = "plan"
    config: ClassVar[type[Frozen]] = PlanSlice
    takes: ClassVar[Mapping[str, Takes]] = {
        "base": Takes("base"),
        "pool_tokens": Takes("tokens"),
        "target_tokens": Takes("tokens", optional=True),
        "checkpoint": Takes("checkpoint", optional=True),
        "curve": Takes("curve", many=True, optional=True),
        "pool": Takes("examples", optional=True),
    }
    gives: ClassVar[Mapping[str, str]] = {"plan": "plan"}
    reads_ledger: ClassVar[bool] = True
    recalls: ClassVar[frozenset[str] | None] = frozenset({"plan", "curve"})

    def chosen(self, config: PlanSlice) -> Iterable[tuple[type[Method], Mapping[str, Any], str]]:
        """Return the techniques that may be chosen."""
        from stages.technique.base import Technique

        techniques = config.plan.techniques
        return [(Technique, settings, f"plan.techniques[{number}]") for number, settings in enumerate(techniques)]

    def methods(self, config: PlanSlice) -> Iterable[tuple[type[Method], str]]:
        """Add the batch selector: what a look holds and takes is part of a plan."""
        from stages.technique.batch_selector import BatchSelector

        picks = config.train.batch_selector
        found = [] if picks is None else [(BatchSelector, name_in(picks, "train.batch_selector"))]
        return [*super().methods(config), *found]

    def external(self, config: PlanSlice, root: Path) -> dict[str, Any]:
        """Return the slice without the limits that no plan reads: where a price changes, nothing is planned anew."""
        return config.model_dump(mode="json", exclude={"budget": {"money", "price", "seconds"}})

    def kin(self, config: PlanSlice, inputs: Inputs) -> Any:
        """Plans of one model on as many devices of one kind know of each other's segments (`stages.plan.residual`)."""
        from stages.meter.machine import device_kind

        base = inputs.one("base").ref.digest
        return {"base": base, "device": device_kind(), "workers": config.train.workers}

    def check(self, config: PlanSlice) -> None:
        """Refuse, beside unknown settings, what reads gradients in training with a technique that has none to give."""
        from stages.technique.base import Technique, refuse_influence
        from stages.technique.batch_selector import refuse_batch_selector

        super().check(config)
        for family, settings, where in self.chosen(config):
            technique = cast(Technique, resolve(family, settings, where))
            if config.train.influence:
                refuse_influence(technique)
            refuse_batch_selector(config.train, technique)

    def run(self, config: PlanSlice, inputs: Inputs, work: Work) -> Summary:
        """Write the plan."""
        from stages.plan.make import make_plan

        return make_plan(config, inputs, work)


STAGE = PlanStage()
