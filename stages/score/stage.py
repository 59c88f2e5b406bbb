"""Score: what each example of the pool is worth for the target.

A scorer (a method) gives the numbers; the engine around it streams the pool, resumes and quarantines. This module is
light: torch is loaded only inside `run`, and only for a scorer that reads tokens or a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from data_contracts.config import ScoreConfig
from data_contracts.cost import Frozen
from data_contracts.errors import ConfigError
from data_contracts.method import Method
from data_contracts.records import Summary
from stages.score.scorer import Scorer
from stages.stage import Inputs, Stage, Takes, Work


class ScoreSlice(Frozen):
    """What the stage reads of the configuration."""

    seed: int
    score: ScoreConfig = ScoreConfig()


class Score(Stage[ScoreSlice]):
    """Score every row of the pool's tokens; a row that cannot be scored has a null score and a quarantine entry."""

    verb: ClassVar[str] = "score"
    config: ClassVar[type[Frozen]] = ScoreSlice
    takes: ClassVar[Mapping[str, Takes]] = {
        "base": Takes("base"),
        "plan": Takes("plan", optional=True),
        "checkpoint": Takes("checkpoint", optional=True, many=True),
        "pool_tokens": Takes("tokens"),
        "target_tokens": Takes("tokens"),
        "pool": Takes("examples", optional=True),
        "target": Takes("examples", optional=True),
        "example_losses": Takes("example_losses", optional=True, many=True),
    }
    gives: ClassVar[Mapping[str, str]] = {"scores": "scores", "quarantine": "quarantine", "features": "features"}
    optional: ClassVar[frozenset[str]] = frozenset({"features"})

    def methods(self, config: ScoreSlice) -> Iterable[tuple[type[Method], str]]:
        """Return the configured scorer."""
        name = config.score.scorer.get("method")
        if not isinstance(name, str):
            raise ConfigError("`score.scorer.method` names a scorer", f"it is {name!r}", "set it, to `influence` say")
        return [(Scorer, name)]

    def run(self, config: ScoreSlice, inputs: Inputs, work: Work) -> Summary:
        """Score the pool; see `engine.score_pool`."""
        from stages.score.engine import score_pool

        return score_pool(config.score, inputs, work)


STAGE = Score()
