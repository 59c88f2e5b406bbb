"""Pools for tests of selectors: numbers by row, as the stage hands them over, and one choice through its guard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.config import SelectConfig
from stages.select.choose import Chosen, choose
from stages.select.features import Features
from stages.select.selector import Candidates


def pool_of(
    *,
    score: Sequence[float] | np.ndarray | None = None,
    column: np.ndarray | None = None,
    feature: np.ndarray | None = None,
    source: Sequence[str] | None = None,
    exact: np.ndarray | None = None,
    length: Sequence[int] | None = None,
) -> Candidates:
    count = next(len(part) for part in (score, column, feature, source) if part is not None)
    if score is None and column is not None:
        score = np.asarray(column).mean(axis=1)
    return Candidates(
        pa.chunked_array([pa.array([f"r{row:05d}" for row in range(count)])]),
        pa.chunked_array([pa.array(list(source) if source is not None else ["s"] * count)]),
        np.array(length if length is not None else [10] * count, dtype=np.int32),
        None if score is None else np.asarray(score, dtype=np.float32),
        None if column is None else lambda: np.asarray(column, dtype=np.float32),
        None if exact is None else lambda: exact,
        features=None
        if feature is None
        else Features(np.arange(count), feature.shape[1], lambda: iter([np.asarray(feature, dtype=np.float32)])),
    )


def chosen(
    pool: Candidates, method: str, *, seed: int = 0, notices: list[str] | None = None, **settings: Any
) -> Chosen:
    quota = {name: settings.pop(name) for name in ("count", "fraction", "tokens") if name in settings}
    config = SelectConfig(selector={"method": method, **settings}, **quota)
    return choose(config, pool, np.random.default_rng(seed), [].append if notices is None else notices.append)
