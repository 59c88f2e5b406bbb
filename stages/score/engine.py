"""The engine of scoring: a coverage asks for passes over the pool, the results are written and said.

Held in memory: what the open method's `prepare` made, one shard of rows, and a few numbers a row of the pool (score,
length, what the coverage keeps and, while the report ranks them, their ranks). Imports no torch: see `supply.py`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np

from data_contracts.config import ScoreConfig
from data_contracts.cost import Cost
from data_contracts.method import resolve
from data_contracts.records import Summary
from stages.score.checkups import Scored
from stages.score.cover import Coverage
from stages.score.figures import FILE, draw
from stages.score.output import write_scores
from stages.score.pool import ScoredPool
from stages.score.report import report
from stages.score.scorer import Scorer
from stages.score.supply import memory_meter
from stages.stage import Inputs, Work


def score_pool(config: ScoreConfig, inputs: Inputs, work: Work) -> Summary:
    """Score every row of `pool_tokens` and write `scores`, sorted by example_id like the pool.

    Raises `InputError` for an empty pool or an unusable target, `MethodError` where no row could be scored.
    """
    method = resolve(Scorer, config.scorer, "score.scorer")
    coverage = resolve(Coverage, config.coverage, "score.coverage")
    coverage.check(method)
    began = time.perf_counter()
    memory = memory_meter([method, *coverage.others()])
    with memory, ExitStack() as resources:
        pool = ScoredPool(config, method, inputs, work, resources)
        covered = coverage.cover(pool)
    final = covered.score_N if covered.finished else method.finish(covered.score_N)
    final_N = np.asarray(final, dtype=np.float32)
    written = write_scores(pool, covered, final_N, work)
    scored = Scored(final_N, written.loss_N, pool.lengths_N, pool.answers_N)
    draw(work.measured("scores", FILE), scored, method.name())
    seconds = time.perf_counter() - began
    peak = max(memory.bytes, pool.peak_bytes)
    work.charge("score", Cost(flops=pool.flops, tokens=pool.tokens, seconds=seconds, peak_bytes=peak))
    return report(
        method,
        groups=pool.groups,
        pool=pool.table,
        scored=scored,
        earlier=((f"earlier scores, {back} back", item.score_N) for back, item in enumerate(pool.previous(), start=1)),
        quarantined=written.reasons,
        examples=inputs.maybe("pool"),
        found={"coverage": coverage.name(), "exact": written.exact, **pool.facts, **covered.facts},
        measured={
            "flops": pool.flops,
            "seconds": round(seconds, 3),
            "peak_bytes": peak,
            "shards_kept_from_before": pool.found,
            "rows_taken_over": pool.taken,
        },
    )
