"""Mix: the share of the next selection that each source of the pool gets, and when it is introduced.

A mixture (a method, `select.mixture`) decides; some try it out by short charged trainings. How a share is filled is the
business of the stage select. This module is light: torch is loaded only where a mixture trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from data_contracts.config import SelectConfig, TrainConfig
from data_contracts.cost import Frozen
from data_contracts.errors import ConfigError
from data_contracts.method import Method
from data_contracts.records import Summary
from stages.mix.mixture import Mixture
from stages.stage import Inputs, Stage, Takes, Work

OPTIMIZER = {"weight_decay", "beta1", "beta2", "epsilon", "clip"}
"""What the stage reads of `train`."""


class MixSlice(Frozen):
    """What the stage reads of the configuration."""

    seed: int
    select: SelectConfig
    train: TrainConfig = TrainConfig()


class Mix(Stage[MixSlice]):
    """Share the selection out to the parts of the pool."""

    verb: ClassVar[str] = "mix"
    config: ClassVar[type[Frozen]] = MixSlice
    takes: ClassVar[Mapping[str, Takes]] = {
        "base": Takes("base", optional=True),
        "plan": Takes("plan", optional=True),
        "checkpoint": Takes("checkpoint", optional=True),
        "pool_tokens": Takes("tokens"),
        "target_tokens": Takes("tokens", optional=True),
        "scores": Takes("scores", optional=True),
        "features": Takes("features", optional=True),
        "example_losses": Takes("example_losses", optional=True, many=True),
        "previous": Takes("mixture", optional=True),
    }
    gives: ClassVar[Mapping[str, str]] = {"mixture": "mixture"}

    def chosen(self, config: MixSlice) -> Iterable[tuple[type[Method], Mapping[str, Any], str]]:
        """Return the configured mixture."""
        return [(Mixture, config.select.mixture, "select.mixture")] if config.select.mixture is not None else []

    def external(self, config: MixSlice, root: Path) -> dict[str, Any]:
        """Return the mixture, whether shares are of tokens, and the settings of the optimizer."""
        return {
            "seed": config.seed,
            "mixture": config.select.mixture,
            "unit": unit_of(config.select),
            "train": config.train.model_dump(mode="json", include=OPTIMIZER),
        }

    def run(self, config: MixSlice, inputs: Inputs, work: Work) -> Summary:
        """Mix; see `engine.mix_parts`. Raises `ConfigError` where no mixture is configured."""
        from stages.mix.engine import mix_parts

        if config.select.mixture is None:
            raise ConfigError(
                "`select.mixture` names a mixture", "it is unset", "set `select.mixture: {method: proportional}`"
            )
        return mix_parts(config.select.mixture, unit_of(config.select), config.train, inputs, work)


def unit_of(select: SelectConfig) -> str:
    """Return what the selection's quota counts, and so what shares are of: rows or tokens."""
    return "tokens" if select.tokens is not None else "rows"


STAGE = Mix()
