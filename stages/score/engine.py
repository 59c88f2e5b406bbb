"""The engine of scoring: streams the pool through a scorer in shards, writes the scores and says what it saw.

Held in memory: what the method's `prepare` made, one shard of rows, and a few numbers a row of the pool (score, length
and, while the report ranks them, their ranks: under 64 bytes). Imports no torch: see `supply.py`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.config import ScoreConfig
from data_contracts.cost import Cost
from data_contracts.errors import InputError, MethodError
from data_contracts.method import resolve
from data_contracts.records import Summary
from stages.score.blocks import BlockScorer
from stages.score.features import gathered, rescored, stored
from stages.score.report import report
from stages.score.scorer import Given, Scorer
from stages.score.shards import Shard, boundaries, read_shard, write_shard
from stages.score.supply import BlockMaker, memory_meter, supply
from stages.stage import Inputs, Work

FAILED_ROWS = 32
"""A shard of at least this many rows that all raise, before any was scored, stops the stage: the method is broken."""


def score_pool(config: ScoreConfig, inputs: Inputs, work: Work) -> Summary:
    """Score every row of `pool_tokens` and write `scores`, sorted by example_id like the pool.

    Raises `InputError` for an empty pool or an unusable target, `MethodError` where no row could be scored.
    """
    method = resolve(Scorer, config.scorer, "score.scorer")
    pool = inputs.one("pool_tokens").table()
    if not pool.num_rows:
        raise InputError("a pool with at least one row", "it has none", "look at the quarantine that ingest wrote")
    began = time.perf_counter()
    memory = memory_meter(method)
    with memory, ExitStack() as resources:
        given = supply(config, method, inputs, work, resources)
        run = _Run(config, method, given, pool, work)
        run.complete()
    final_N = np.asarray(method.finish(run.scores()), dtype=np.float32)
    quarantined = run.write(final_N)
    seconds = time.perf_counter() - began
    work.charge("score", Cost(flops=run.flops, tokens=run.tokens, seconds=seconds, peak_bytes=memory.bytes))
    return report(
        method,
        groups=given.groups if method.grouped else (),
        pool=pool,
        score_N=final_N,
        quarantined=quarantined,
        examples=inputs.maybe("pool"),
        flops=run.flops,
        found=given.facts,
        measured={"seconds": round(seconds, 3), "peak_bytes": memory.bytes, "shards_kept_from_before": run.adopted},
    )


class _Run:
    """One pass over the pool: every shard scored or found, then all of them written."""

    def __init__(self, config: ScoreConfig, method: Scorer, given: Given, pool: pa.Table, work: Work) -> None:
        self._config, self._method, self._given, self._pool, self._work = config, method, given, pool, work
        self._lengths_N = pool.column("n_tokens").to_numpy()
        self._ranges = list(boundaries(self._lengths_N, config.batch_tokens))
        self._maker = BlockMaker(method, given, pool)
        self.adopted = 0
        self.flops, self.tokens = 0, 0
        self._gathered: Any = None

    def complete(self) -> None:
        """Prepare the method and score each shard that is not there yet."""
        missing = {bounds for bounds in self._ranges if self._read(*bounds) is None}
        self.adopted = len(self._ranges) - len(missing)
        state = self._method.prepare(self._given)
        meter = self._given.meter
        self.flops, self.tokens = meter.flops, meter.tokens  # of preparing: the same in every attempt
        scorer = BlockScorer(self._method, state, self._maker.block, self._maker.settle, self._config.combine)
        scored_any = self.adopted > 0
        with self._work.progress("score", float(self._lengths_N.sum()), "tokens") as bar:
            for start, stop in self._ranges:
                if (start, stop) in missing:
                    scored_any |= self._score(scorer, start, stop, scored_any)
                bar.advance(float(self._lengths_N[start:stop].sum()))
        for start, stop in self._ranges:
            shard = self._found(start, stop)
            self.flops, self.tokens = self.flops + shard.flops, self.tokens + shard.tokens
        if self._method.second_pass:
            before = meter.flops
            self._gathered = gathered(self._method, (self._found(*bounds).table for bounds in self._ranges), state)
            self.flops += meter.flops - before

    def _score(self, scorer: BlockScorer, start: int, stop: int, scored_any: bool) -> bool:
        """Score one shard and return whether any row of it could be scored."""
        meter = self._given.meter
        flops, tokens = meter.flops, meter.tokens
        outcomes: list[Any] = [None] * (stop - start)
        for rows in self._maker.buckets(start, stop):
            for row, outcome in zip(rows, scorer.score(rows), strict=True):
                outcomes[row - start] = outcome
        good = sum(not outcome.reason for outcome in outcomes)
        if not good and not scored_any and len(scorer.failures) >= min(FAILED_ROWS, self._pool.num_rows):
            raise MethodError(
                f"scorer {self._method.name()} scores at least one row",
                f"all of the first {len(outcomes)} failed, such as {scorer.failures[0]}",
                "mend the method, or look at the first row's quarantine entry",
            )
        part = self._pool.slice(start, stop - start)
        write_shard(
            self._work.folder,
            start,
            {name: part.column(name).to_pylist() for name in ("example_id", "source", "n_tokens", "n_answer_tokens")},
            outcomes,
            combine=self._config.combine,
            flops=meter.flops - flops,
            tokens=meter.tokens - tokens,
        )
        return good > 0

    def _read(self, start: int, stop: int) -> Shard | None:
        return read_shard(self._work.folder, start, stop)

    def _found(self, start: int, stop: int) -> Shard:
        shard = self._read(start, stop)
        assert shard is not None, "a shard that was just completed"
        if self._gathered is None:
            return shard
        return replace(shard, table=rescored(self._method, shard.table, self._gathered, self._config.combine))

    def scores(self) -> np.ndarray:
        """Return score_N float32 of the whole pool, NaN where there is none."""
        score_N = np.empty(self._pool.num_rows, dtype=np.float32)
        for start, stop in self._ranges:
            score_N[start:stop] = self._found(start, stop).table.column("score").to_numpy()
        return score_N

    def write(self, final_N: np.ndarray) -> dict[str, int]:
        """Write `scores`, the quarantine and the features kept; return the number of quarantined rows by reason."""
        reasons: dict[str, int] = {}
        with ExitStack() as files:
            writer = files.enter_context(self._work.writer("scores"))
            features = files.enter_context(self._work.writer("features")) if self._method.keeps_features else None
            for start, stop in self._ranges:
                table, final = self._found(start, stop).table, final_N[start:stop]
                usable = np.isfinite(final)
                score = pa.array(final, type=pa.float32(), mask=~usable)
                place = table.schema.get_field_index("score")
                writer.extend(table.set_column(place, writer.schema.field("score"), score))
                self._quarantine(table, usable, reasons)
                if features is not None:
                    features.extend(stored(table))
        if sum(reasons.values()) == self._pool.num_rows:
            raise MethodError(
                f"scorer {self._method.name()} scores at least one row",
                f"none of {self._pool.num_rows} could be scored ({_counted(reasons)})",
                "look at the model's loss on the pool, or choose another scorer",
            )
        return reasons

    def _quarantine(self, table: pa.Table, usable: np.ndarray, reasons: dict[str, int]) -> None:
        for index in np.flatnonzero(~usable).tolist():
            reason = table.column("reason")[index].as_py() or "score_not_finite"
            detail = table.column("detail")[index].as_py() or "its score over the whole pool is not a number"
            reasons[reason] = reasons.get(reason, 0) + 1
            example_id = table.column("example_id")[index].as_py()
            self._work.quarantine(split="pool", reason=reason, detail=detail, example_id=example_id, field="score")


def _counted(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
