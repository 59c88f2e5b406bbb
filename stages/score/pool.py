"""The pool as a coverage sees it: passes of a scorer over some rows, earlier rounds, random numbers.

One method is open at a time (its model is the largest thing in memory), here or on workers; opening it again prepares
it again, so what preparing costs is the same in every attempt. Every worker prepares the method for itself, and each is
charged. Held: a few numbers a row of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from data_contracts.config import ScoreConfig
from data_contracts.errors import InputError
from stages.score.fill import Filler
from stages.score.glance import Glance, first_answers, widest
from stages.score.hand import ENTRY, Hands, Job, Prepared
from stages.score.passes import ScorePass
from stages.score.previous import Scoring, newest_first
from stages.score.reuse import earlier_commit, taken_over
from stages.score.scorer import Scorer
from stages.score.shards import ShardFolder
from stages.score.supply import BlockMaker, Opened, device_of_models, lengths_seen, open_scorer
from stages.stage import Inputs, Work


class ScoredPool:
    """A `Pool` over the stage's inputs. Use inside `resources`, which closes what is open.

    `flops` and `tokens` are what was spent on all passes so far, `passes` those of whole rows, in the order made,
    `peak_bytes` the most memory of one worker, where there were several.
    """

    def __init__(self, config: ScoreConfig, method: Scorer, inputs: Inputs, work: Work, resources: ExitStack) -> None:
        self.method, self.table = method, inputs.one("pool_tokens").table()
        if not self.table.num_rows:
            raise InputError("a pool with at least one row", "it has none", "look at the quarantine that ingest wrote")
        self.lengths_N = self.table.column("n_tokens").to_numpy()
        self.answers_N = self.table.column("n_answer_tokens").to_numpy()
        self.passes: list[ScorePass] = []
        self.groups: tuple[str, ...] = ()
        self.facts: dict[str, Any] = {}
        self.flops = self.tokens = self.found = self.taken = self.peak_bytes = 0
        self._config, self._inputs, self._work, self._resources = config, inputs, work, resources
        self._opened: Opened | None = None
        self._hands: tuple[Scorer, Hands] | None = None
        self._open = resources.enter_context(ExitStack())

    def notice(self, text: str) -> None:
        """Tell the user something once."""
        self._work.notice(text)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def score(
        self, name: str, rows: np.ndarray | None = None, *, method: Scorer | None = None, glance: Glance | None = None
    ) -> ScorePass:
        """Score rows and return the pass; see `Pool`."""
        method, whole = method or self.method, rows is None
        rows = np.arange(len(self)) if rows is None else rows
        folder = ShardFolder(self._work.folder / "shards" / name, self._config.combine)
        lengths_N = lengths_seen(method, self.table, glance)
        made = ScorePass(method, lengths_N, self.table, rows, folder, self._config.batch_tokens)
        earlier = earlier_commit(self._work, method) if whole and glance is None else None
        shown = "score" if name == "full" else f"score: {name}"
        with self._work.progress(shown, float(made.seen_tokens), "tokens") as bar:
            proven = any(before.scored_any for before in self.passes if before.method is method)
            if made.missing and self._config.workers > 1 and "model" in method.reads:
                hands = self._hired(method)
                made.complete(lambda missing: hands.fill(name, folder, glance, earlier, missing), bar, proven=proven)
                self._charge(method, *hands.prepared())
                self.peak_bytes = max(self.peak_bytes, hands.peak_bytes)
            else:
                opened = self._opening(method)
                maker = opened.maker if glance is None else BlockMaker(method, opened.given, self.table, glance)
                taken = taken_over(earlier, self.table, self._config.batch_tokens)
                filler = Filler(opened, maker, self.table, folder, taken)
                made.complete(lambda missing: (filler.fill(*shard) for shard in missing), bar, proven=proven)
        if method.second_pass:
            made.gather(self._opening(method))
        self.flops, self.tokens = self.flops + made.flops, self.tokens + made.tokens
        self.found, self.taken = self.found + made.found, self.taken + made.taken
        if glance is None:
            self.passes.append(made)
        return made

    def _opening(self, method: Scorer) -> Opened:
        """Return the method prepared here; what was open before is closed first."""
        if self._opened is None or self._opened.method is not method:
            self._close()
            opened = open_scorer(self._config, method, self._inputs, self._work, self.table, self._open)
            self._opened, given = opened, opened.given
            self._charge(method, Prepared.of(given), 1)
        return self._opened

    def _hired(self, method: Scorer) -> Hands:
        """Return workers that prepare the method, or have; what was open before is closed first."""
        from stages.workers.bulk import crew

        if self._hands is None or self._hands[0] is not method:
            self._close()
            job = Job.of(self._config, method, self._inputs, self._work)
            workers, threads, device = self._config.workers, job["threads"], device_of_models()
            started = crew(ENTRY, job, workers=workers, threads=threads, device=device, folder=self._work.folder)
            self._hands = method, Hands(self._open.enter_context(started))
        return self._hands[1]

    def _close(self) -> None:
        self._open.close()
        self._opened = self._hands = None

    def _charge(self, method: Scorer, prepared: Prepared, times: int) -> None:
        """Take in what preparing cost, each of so many times, and found."""
        self.flops, self.tokens = self.flops + times * prepared.flops, self.tokens + times * prepared.tokens
        self.facts |= prepared.facts
        for text in prepared.notices:
            self.notice(text)
        if method is self.method and method.grouped:
            self.groups = prepared.groups

    def previous(self) -> Iterator[Scoring]:
        """Yield the earlier rounds' scores in the order of the pool's rows, newest first."""
        tables = [artifact.table() for artifact in self._inputs.all("previous_scores")]
        yield from newest_first(self.table.column("example_id"), tables)

    def glance(self, share: float) -> Glance:
        """Return the widest glance at no more than `share` of the pool's tokens."""
        return widest(first_answers(self.table), self.lengths_N, share)

    def combined(self, group_nJ: np.ndarray) -> np.ndarray:
        """Return score_n float32 of columns, as configured."""
        with np.errstate(over="ignore", invalid="ignore"):
            found = group_nJ.max(axis=1) if self._config.combine == "max" else group_nJ.mean(axis=1, dtype=np.float64)
            return np.asarray(found, dtype=np.float32)

    def rng(self, *names: str | int) -> np.random.Generator:
        """Return a generator of the configured seed and `names`."""
        return self._work.rng("score", *names)
