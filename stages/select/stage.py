"""Select: which examples of the pool are trained on, in which order of preference, and why.

A selector (a method) ranks and chooses within a quota; the engine joins scores, guards the choice and writes it. Given
validation examples, it says how many of the rows chosen are of their kind. Reads no model: it never loads torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from data_contracts.config import SelectConfig, TrainConfig
from data_contracts.cost import Frozen
from data_contracts.method import Method
from data_contracts.records import Summary
from stages.select.noise import NoiseFilter
from stages.select.repetition import Repetition
from stages.select.selector import Selector
from stages.stage import Inputs, Stage, Takes, Work


class SelectSlice(Frozen):
    """What the stage reads of the configuration."""

    seed: int
    select: SelectConfig = SelectConfig(fraction=0.1)
    train: TrainConfig = TrainConfig()


class Select(Stage[SelectSlice]):
    """Choose rows of the pool; rows without a valid score are listed in the quarantine and never chosen by score."""

    verb: ClassVar[str] = "select"
    config: ClassVar[type[Frozen]] = SelectSlice
    takes: ClassVar[Mapping[str, Takes]] = {
        "pool_tokens": Takes("tokens"),
        "scores": Takes("scores", optional=True),
        "features": Takes("features", optional=True),
        "target_tokens": Takes("tokens", optional=True),
        "mixture": Takes("mixture", optional=True),
        "plan": Takes("plan", optional=True),
        "pool": Takes("examples", optional=True),
        "target": Takes("examples", optional=True),
        "validation": Takes("examples", optional=True),
        "example_losses": Takes("example_losses", optional=True, many=True),
        "other_scores": Takes("scores", optional=True, many=True),
    }
    gives: ClassVar[Mapping[str, str]] = {
        "selection": "selection",
        "quarantine": "quarantine",
        "repetition": "repetition",
        "likeness": "likeness",
    }
    optional: ClassVar[frozenset[str]] = frozenset({"repetition", "likeness"})

    def chosen(self, config: SelectSlice) -> Iterable[tuple[type[Method], Mapping[str, Any], str]]:
        """Return the configured selector, noise filter and law of repetition."""
        select = config.select
        found: list[tuple[type[Method], Mapping[str, Any], str]] = [(Selector, select.selector, "select.selector")]
        if select.noise is not None:
            found.append((NoiseFilter, select.noise, "select.noise"))
        if select.repetition is not None:
            found.append((Repetition, select.repetition, "select.repetition"))
        return found

    def external(self, config: SelectSlice, root: Path) -> dict[str, Any]:
        """Return the slice with no more of `train` than is read: the passes over the selection, for repetition."""
        read = {"epochs"} if config.select.repetition is not None else set()
        return config.model_dump(mode="json", include={"seed": True, "select": True, "train": read})

    def run(self, config: SelectSlice, inputs: Inputs, work: Work) -> Summary:
        """Choose and write; see `engine.select_rows`."""
        from stages.select.engine import select_rows

        return select_rows(config.select, inputs, work, passes=config.train.epochs)


STAGE = Select()
