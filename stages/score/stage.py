"""Score: what each example of the pool is worth for the target.

A scorer (a method) gives the numbers, a coverage (a method) says which rows it computes; the engine around them streams
the pool, resumes and quarantines. This module is light: torch is loaded only inside `run`, and only for a scorer that
reads tokens or a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from data_contracts.config import ScoreConfig
from data_contracts.cost import Frozen
from data_contracts.method import Method, find, name_in, resolve
from data_contracts.records import Plan, Summary
from stages.score.cover import Coverage
from stages.score.scorer import Scorer
from stages.stage import Inputs, Stage, Takes, Work

ROWS = {"pool", "pool_tokens", "plan", "previous_scores"}
"""Inputs that do not decide what a computed row is given, but for the plan's precision."""


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
        "reference": Takes("checkpoint", optional=True),
        "pool_tokens": Takes("tokens"),
        "target_tokens": Takes("tokens"),
        "pool": Takes("examples", optional=True),
        "target": Takes("examples", optional=True),
        "example_losses": Takes("example_losses", optional=True, many=True),
        "previous_scores": Takes("scores", optional=True, many=True),
    }
    gives: ClassVar[Mapping[str, str]] = {"scores": "scores", "quarantine": "quarantine", "features": "features"}
    optional: ClassVar[frozenset[str]] = frozenset({"features"})

    def chosen(self, config: ScoreSlice) -> Iterable[tuple[type[Method], Mapping[str, Any], str]]:
        """Return the configured scorer and coverage."""
        return [(Scorer, config.score.scorer, "score.scorer"), (Coverage, config.score.coverage, "score.coverage")]

    def methods(self, config: ScoreSlice) -> Iterable[tuple[type[Method], str]]:
        """Return the configured scorer and coverage, and the scorers that the coverage names."""
        inside = _inside(_whole(config.score.coverage))
        return [
            *super().methods(config),
            *((Scorer, name_in(settings, "score.coverage")) for settings in inside),
        ]

    def check(self, config: ScoreSlice) -> None:
        """Refuse what scoring would: names, settings, the coverage's own scorers, and a pair that does not go."""
        coverage = resolve(Coverage, config.score.coverage, "score.coverage")
        coverage.check(resolve(Scorer, config.score.scorer, "score.scorer"))

    def external(self, config: ScoreSlice, root: Path) -> dict[str, Any]:
        """Return the slice without what changes only how it is done."""
        return _what(config)

    def kin(self, config: ScoreSlice, inputs: Inputs) -> Any:
        """Return what decides a row's numbers besides the row, where the coverage computes all rows in one pass."""
        scorer, coverage = (str(settings.get("method")) for settings in (config.score.scorer, config.score.coverage))
        if not find(Coverage, coverage).whole:
            return None
        planned = inputs.maybe("plan")
        plan = planned.record(Plan) if planned else None
        sources = inputs.one("target_tokens").table().column("source")
        groups = 1 if config.score.groups == "all" else len(sources.unique())
        given = {
            name: [artifact.ref.digest for artifact in inputs.all(name)] for name in sorted(set(self.takes) - ROWS)
        }
        return {
            "config": _what(config),
            "precision": plan.precision if plan else None,
            "inputs": given,
            "regime": find(Scorer, scorer).regime(inputs.one("pool_tokens").ref.rows, groups, plan),
        }

    def run(self, config: ScoreSlice, inputs: Inputs, work: Work) -> Summary:
        """Score the pool; see `engine.score_pool`."""
        from stages.score.engine import score_pool

        return score_pool(config.score, inputs, work)


def _whole(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a coverage's settings with the defaults of those not given: a scorer may be named by default."""
    fields = find(Coverage, str(settings.get("method"))).model_fields
    return {name: field.get_default(call_default_factory=True) for name, field in fields.items()} | dict(settings)


def _what(config: ScoreSlice) -> dict[str, Any]:
    """Return the configuration but for the number of workers, which changes no byte of what comes out."""
    return config.model_dump(mode="json", exclude={"score": {"workers"}})


def _inside(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield every method's settings below `settings`."""
    for value in settings.values():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, Mapping):
                yield from [item] if "method" in item else []
                yield from _inside(item)


STAGE = Score()
