"""Cascade: cheap scorers choose what the dear one sees. `filters: [{method: bm25, keep: 0.4}]`, then `score.scorer`.

Each filter scores the rows that the one before it let through and passes its best share on; the scorer computes what is
left. A row that a filter left out keeps the filters' order, below every computed row: it is chosen only when those are
used up. Its number is a place in that order, no measurement, and its `group_scores` are empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import Field

from data_contracts.config import MethodSettings
from data_contracts.errors import ConfigError, MethodError
from data_contracts.method import resolve
from stages.score.cover import Coverage, Covered, Pool
from stages.score.scorer import Scorer


class Cascade(Coverage):
    """The best part of the pool by one or more cheap scorers is computed; the rest follows in the filters' order."""

    filters: tuple[MethodSettings, ...] = Field(
        ({"method": "bm25", "keep": 0.4},),
        min_length=1,
        description="In order: a scorer's settings, and `keep`, the share of the rows given to it that goes on.",
    )

    @cached_property
    def chain(self) -> tuple[tuple[Scorer, float], ...]:
        """The filters with the share each keeps. Raises `ConfigError` for a share that is none."""
        found = []
        for index, settings in enumerate(self.filters):
            where, keep = f"score.coverage.filters.{index}", settings.get("keep")
            if not isinstance(keep, (int, float)) or isinstance(keep, bool) or not 0 < keep <= 1:
                raise ConfigError(
                    f"`{where}.keep` is a share above 0, at most 1", f"it is {keep!r}", "set it, to 0.4 say"
                )
            method = resolve(Scorer, {name: value for name, value in settings.items() if name != "keep"}, where)
            found.append((method, float(keep)))
        return tuple(found)

    def others(self) -> Iterable[Scorer]:
        """Return the filters' scorers."""
        return [method for method, _ in self.chain]

    def cover(self, pool: Pool) -> Covered:
        """Filter, compute what is left, and put the others below it."""
        rows, last = np.arange(len(pool)), []
        for index, (method, keep) in enumerate(self.chain):
            score_n = method.finish(pool.score(f"filter-{index + 1}", rows, method=method).score())
            order = np.argsort(-score_n.astype(np.float64), kind="stable")[: int(np.isfinite(score_n).sum())]
            kept = math.ceil(keep * len(order))
            last.append(rows[order[kept:]])
            rows = np.sort(rows[order[:kept]])
        if not len(rows):
            raise MethodError("the filters leave rows to compute", "they could score none", "use another filter")
        final_n = pool.method.finish(pool.score("full", rows).score())
        score_N = np.full(len(pool), np.nan, dtype=np.float32)
        score_N[rows] = final_n
        if not np.isfinite(final_n).any():
            raise MethodError(
                f"scorer {pool.method.name()} scores at least one row that the filters keep",
                f"it scored none of {len(rows)}",
                "look at the model's loss on the pool, or choose another scorer",
            )
        outside = np.concatenate(last[::-1])  # what came farther stands before what fell first
        score_N[outside] = below(final_n, len(outside))
        return Covered(score_N, finished=True, facts={"outside_the_cascade": len(outside)})


def below(score_n: np.ndarray, count: int) -> np.ndarray:
    """Return `count` falling float32 numbers below all finite `score_n`, within as wide a range as those take.

    No two are equal, so the order is kept by who sorts them, however it breaks ties: where the steps are finer than
    float32 each is the next number below the one before. (Only where fewer than `count` numbers lie between the least
    score and float32's end do the last ones share that end.)
    """
    finite = score_n[np.isfinite(score_n)].astype(np.float64)
    least = finite.min()
    span = max(finite.max() - least, abs(least) * 1e-3, 1e-6)
    steps = np.arange(1, count + 1) / max(1, count)
    under = _order(np.nextafter(np.float32(least), np.float32(-np.inf)))
    with np.errstate(over="ignore"):
        wanted = _order((least - span * steps).astype(np.float32))
    place, end = np.arange(count), _order(np.finfo(np.float32).min)
    wanted = np.minimum(np.maximum(wanted, end + place[::-1]), under - place)  # room for those that follow
    return _number(np.maximum(np.minimum.accumulate(wanted + place) - place, end))


def _order(value: Any) -> np.ndarray:
    """Return int64 that order float32 numbers, neighbours one apart: the bits, those of negative numbers mirrored."""
    bits = np.asarray(value, dtype=np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _number(order: np.ndarray) -> np.ndarray:
    """Undo `_order`."""
    size = np.abs(order).astype(np.int32).view(np.float32)
    return np.where(order < 0, -size, size)
