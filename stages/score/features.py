"""Stored gradient features: from the shards that scoring left to the artifact `features`.

A part of the rows at a time is in memory, whatever the pool holds. Also the second pass of a method whose scores come
of the features of the whole pool: its columns replace those of the first, in shards of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from data_contracts.tables import FEATURES
from stages.gradients.stored import decoded
from stages.score.blocks import combined
from stages.score.scorer import Scorer


class FeatureScorer(Scorer):
    """A scorer that makes features of examples and can leave them as an artifact."""

    store_bits: Literal[0, 1, 4, 8, 16] = Field(
        0, description="Bits a number of each row's feature in the artifact `features`; 0 leaves none."
    )

    @property
    def keeps_features(self) -> bool:
        """Whether the stage writes `features`."""
        return self.store_bits > 0


def stored(table: pa.Table) -> pa.Table:
    """Return the rows of a shard that have a feature, in the contract's columns."""
    return table.filter(pc.is_valid(table.column("code"))).select(FEATURES.schema.names)


def gathered(method: Scorer, shards: Iterable[pa.Table], state: Any) -> Any:
    """Return what `method.gather` makes of the features in these shards."""
    return method.gather((feature_BK for shard in shards for _, feature_BK in decoded(stored(shard))), state)


def rescored(method: Scorer, shard: pa.Table, found: Any, combine: Literal["mean", "max"]) -> pa.Table:
    """Return the shard with the second pass's columns; a row whose score is not finite then has none and says so."""
    usable = np.flatnonzero(pc.is_valid(shard.column("code")).to_numpy())
    first = shard.column("group_scores")
    columns: list[list[float]] = first.to_pylist()
    score, reason = shard.column("score").to_pylist(), shard.column("reason").to_pylist()
    at = 0
    for ids, feature_BK in decoded(stored(shard)):
        rows = usable[at : at + len(ids)]
        first_BJ = np.array([columns[row] for row in rows], dtype=np.float32)
        second_BJ = np.asarray(method.rescore(feature_BK, first_BJ, found), dtype=np.float32)
        for row, column_J in zip(rows.tolist(), second_BJ, strict=True):
            value = combined(column_J, combine)
            good = bool(np.isfinite(column_J).all() and np.isfinite(value))
            score[row], columns[row] = (value, column_J.tolist()) if good else (None, [])
            reason[row] = "" if good else "score_not_finite"
        at += len(ids)
    changed: dict[str, list[Any]] = {"score": score, "group_scores": columns, "reason": reason}
    changed["exact"] = [value is not None for value in score]
    for name, values in changed.items():
        place = shard.schema.get_field_index(name)
        shard = shard.set_column(place, shard.schema.field(name), pa.array(values, type=shard.schema.field(name).type))
    return shard
