"""One worker of scoring: it prepares the method once, then scores the shards that it is handed.

What comes and goes is plain data; the rows, the model and the shards are files that every worker reaches under the same
paths. `stages/workers/bulk.py` starts workers and hands out shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_contracts.config import ScoreConfig
from data_contracts.cost import Frozen
from data_contracts.records import Ref
from stages.score.fill import Filled, Filler
from stages.score.glance import Glance
from stages.score.reuse import taken_over
from stages.score.scorer import Given, Scorer
from stages.score.shards import ShardFolder
from stages.score.supply import BlockMaker, open_scorer
from stages.stage import Artifact, Inputs, Work

if TYPE_CHECKING:
    from stages.workers.bulk import Crew

ENTRY = "stages.score.hand:open_hand"


class Job(Frozen):
    """What a worker prepares: a scorer ("package.module:class" and its settings) and the stage's inputs."""

    config: ScoreConfig
    scorer: str
    settings: dict[str, Any]
    seed: int
    threads: int
    inputs: dict[str, tuple[tuple[Ref, Path], ...]]

    @classmethod
    def of(cls, config: ScoreConfig, method: Scorer, inputs: Inputs, work: Work) -> dict[str, Any]:
        """Return the job as plain data; `threads` are this process's: the last bits of a sum depend on their number."""
        import torch

        kind = type(method)
        given = {
            name: tuple((artifact.ref, artifact.folder.resolve()) for artifact in inputs.all(name))
            for name in inputs.names()
        }
        return cls(
            config=config,
            scorer=f"{kind.__module__}:{kind.__qualname__}",
            settings=method.model_dump(mode="json"),
            seed=work.seed("score", method.name()),
            threads=torch.get_num_threads(),
            inputs=given,
        ).model_dump(mode="json")


class Prepared(Frozen):
    """What preparing took and found; the same on every worker."""

    flops: int
    tokens: int
    groups: tuple[str, ...]
    facts: dict[str, Any]
    notices: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Given, notices: Iterable[str] = ()) -> Prepared:
        """Return what the meter and the facts of `given` hold now."""
        meter = given.meter
        return cls(
            flops=meter.flops, tokens=meter.tokens, groups=given.groups, facts=given.facts, notices=tuple(notices)
        )


class _Desk:
    """The seed as the stage had it, and what was to be told."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.notices: list[str] = []

    def seed(self, *names: str | int) -> int:
        return self._seed

    def notice(self, text: str) -> None:
        self.notices.append(text)


def open_hand(
    job: Mapping[str, Any], resources: ExitStack
) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """Prepare the scorer; return a `Prepared` and what scores one shard, both in plain data."""
    import torch

    from stages.meter.memory import peak_bytes
    from stages.workers.telling import function_of

    wanted = Job.model_validate(job)
    torch.set_num_threads(wanted.threads)
    method: Scorer = function_of(wanted.scorer)(**wanted.settings)
    inputs = Inputs({name: [Artifact(ref, folder) for ref, folder in given] for name, given in wanted.inputs.items()})
    desk, pool = _Desk(wanted.seed), inputs.one("pool_tokens").table()
    opened = open_scorer(wanted.config, method, inputs, desk, pool, resources)
    given = opened.given
    fillers: dict[str, Filler] = {}

    def do(task: Mapping[str, Any]) -> dict[str, Any]:
        place = task["folder"]
        if place not in fillers:
            glance = Glance(*task["glance"]) if task["glance"] else None
            maker = BlockMaker(method, given, pool, glance)
            earlier = task["earlier"]
            tables = (Path(earlier[0]), Path(earlier[1])) if earlier else None
            taken = taken_over(tables, pool, wanted.config.batch_tokens)
            fillers.clear()  # passes follow one another
            fillers[place] = Filler(opened, maker, pool, ShardFolder(Path(place), wanted.config.combine), taken)
        filled = fillers[place].fill(task["start"], np.array(task["rows"], dtype=np.int64))
        return {"filled": asdict(filled), "peak_bytes": peak_bytes()}

    return Prepared.of(given, desk.notices).model_dump(mode="json"), do


class Hands:
    """The workers of one method, as the pool has them: they fill shards of its passes."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._charged = 0
        self.peak_bytes = 0
        """The most memory of one worker."""

    def fill(
        self,
        name: str,
        folder: ShardFolder,
        glance: Glance | None,
        earlier: tuple[Path, Path] | None,
        missing: Iterable[tuple[int, np.ndarray]],
    ) -> Iterator[Filled]:
        """Have these (start, rows) of the pass `name` scored, and say so of each in their order."""
        folder.place.mkdir(parents=True, exist_ok=True)
        common = {
            "folder": str(folder.place.resolve()),
            "glance": (glance.context, glance.answer) if glance else None,
            "earlier": tuple(str(path.resolve()) for path in earlier) if earlier else None,
        }
        tasks = ({**common, "start": start, "rows": rows.tolist()} for start, rows in missing)

        def named(task: Mapping[str, Any]) -> str:
            rows = len(task["rows"])
            return f"shard {task['start']} of the pass {name!r} ({rows} rows from {task['rows'][0]} of the pool)"

        for told in self._crew.do(tasks, named):
            self.peak_bytes = max(self.peak_bytes, told["peak_bytes"])
            yield Filled(**told["filled"])

    def prepared(self) -> tuple[Prepared, int]:
        """Return what preparing took each worker, and how many were hired since this was asked last."""
        fresh = self._crew.hired - self._charged
        self._charged = self._crew.hired
        return Prepared.model_validate(self._crew.prepared), fresh
