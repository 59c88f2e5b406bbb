"""Weigh ways of choosing against each other: what each taught in a short training, and what it costs from here on.

Every arm was scored, selected and trained by the stages of those names, from one checkpoint and with equal FLOPs. Reads
each arm's validation loss document by document, so that what is common to the arms cancels. No model is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from data_contracts.config import AutoConfig
from data_contracts.cost import Frozen
from data_contracts.records import Summary
from stages.stage import Inputs, Stage, Takes, Work


class WeighSlice(Frozen):
    """What weighing reads of the configuration: the arms that were tried, in the order of the inputs."""

    seed: int
    auto: AutoConfig


class Weigh(Stage[WeighSlice]):
    """Curves, validation losses and selections of the arms to the one that pays."""

    verb: ClassVar[str] = "weigh"
    config: ClassVar[type[Frozen]] = WeighSlice
    takes: ClassVar[Mapping[str, Takes]] = {
        "plan": Takes("plan"),
        "decision": Takes("decision"),
        "target_tokens": Takes("tokens"),
        "start": Takes("validation_losses"),
        "validation_losses": Takes("validation_losses", many=True),
        "curve": Takes("curve", many=True),
        "selection": Takes("selection", many=True),
    }
    gives: ClassVar[Mapping[str, str]] = {"weighing": "weighing"}
    reads_ledger: ClassVar[bool] = True

    def run(self, config: WeighSlice, inputs: Inputs, work: Work) -> Summary:
        """Write the weighing; see `engine.weigh_arms`."""
        from stages.weigh.engine import weigh_arms

        return weigh_arms(config.auto, inputs, work)


STAGE = Weigh()
