"""The product's scorers on rows and models in memory, without a stage or a store: for benchmarks that make both."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from data_contracts.method import resolve
from data_contracts.tables import TOKENS
from stages.score.scorer import Block, Given, Meter, Scorer

if TYPE_CHECKING:
    from stages.model.batch import Row
    from stages.model.checkpoint import TrainedModel


def table_of(rows: Sequence[Row], source: str = "all") -> pa.Table:
    """Return rows as a `tokens` table."""
    columns = {
        "example_id": [row.example_id for row in rows],
        "source": [source] * len(rows),
        "input_ids": [row.input_ids.tolist() for row in rows],
        "answer_mask": [row.answer_mask.tolist() for row in rows],
        "n_tokens": [len(row.input_ids) for row in rows],
        "n_answer_tokens": [int(row.answer_mask.sum()) for row in rows],
        "truncated": [False] * len(rows),
    }
    return pa.table(columns, schema=TOKENS.schema)


def scores_of(
    settings: dict[str, Any],
    trained: TrainedModel,
    pool: Sequence[Row],
    items: Sequence[Row],
    *,
    batch_tokens: int = 4096,
    bfloat16: bool = False,
) -> np.ndarray:
    """Return what a scorer says of every pool row, (N, J): for each item, its own target group, or one column.

    `trained` is left as it was.
    """
    import torch

    from stages.model.batch import TokenTable, collate, length_buckets
    from stages.model.checkpoint import TrainedModel

    method = resolve(Scorer, settings, "score.scorer")
    own = TrainedModel(trained.model, dict(trained.moments), trained.trainer)
    score_NJ: np.ndarray | None = None
    with ExitStack() as resources:
        given = Given(
            seed=0,
            pool_rows=len(pool),
            batch_tokens=batch_tokens,
            meter=Meter(),
            notice=print,
            resources=resources,
            groups=tuple(row.example_id for row in items),
            members=tuple(np.array([index]) for index in range(len(items))),
            target=TokenTable(table_of(items)) if items else None,
            trained=own,
            checkpoints=[own],
            autocast=torch.bfloat16 if bfloat16 else None,
        )
        state = method.prepare(given)
        for bucket in length_buckets([len(row.input_ids) for row in pool], batch_tokens):
            rows = [pool[index] for index in bucket]
            lengths_B = np.array([len(row.input_ids) for row in rows])
            answers_B = np.array([int(row.answer_mask.sum()) for row in rows])
            block = Block([row.example_id for row in rows], lengths_B, answers_B, given.meter, collate(rows))
            found_BJ = np.asarray(method.score(block, state)).reshape(len(rows), -1)
            score_NJ = np.zeros((len(pool), found_BJ.shape[1])) if score_NJ is None else score_NJ
            score_NJ[bucket] = found_BJ
    assert score_NJ is not None, "a pool with at least one row"
    return score_NJ
