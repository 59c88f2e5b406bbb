"""One choice, guarded: what a selector may see, what it may return, and the rows of the `selection` table.

Shared by the stage and by the plain-file entry. Held in memory: a score, a length and an order a row of the pool (16 to
24 bytes), and the chosen rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.config import SelectConfig
from data_contracts.errors import ConfigError, InputError, MethodError
from data_contracts.method import resolve
from data_contracts.tables import SELECTION
from stages.select.parts import Part, choose_parts, replayed
from stages.select.quota import Quota
from stages.select.repetition import Curve, Repetition
from stages.select.selector import Candidates, Choice, Selector


@dataclass(frozen=True)
class Chosen:
    """The selection as a table of its contract, who chose, the rows of the pool that were taken, what was asked, and
    where repetition was weighed its curve for each part ("" for the whole pool); how many rows are replayed."""

    table: pa.Table
    method: Selector
    rows: np.ndarray
    quota: Quota
    curves: Mapping[str, Curve] = field(default_factory=dict)
    replayed: int = 0


def choose(
    config: SelectConfig,
    pool: Candidates,
    rng: np.random.Generator,
    notice: Callable[[str], None],
    *,
    target_ids: Sequence[str] = (),
    parts: Sequence[Part] = (),
    passes: float = 1.0,
    kept_K: np.ndarray | None = None,
) -> Chosen:
    """Choose from `pool` and put `target_ids` behind (outside the quota, mixture "target").

    With `parts` each part of the mixture is chosen from by itself. `passes` are those that training will make over the
    selection; only repetition reads them. A selector sees the rows `kept_K` alone where they are given; a fraction is
    of the whole pool all the same.

    Raises `InputError` where there is nothing to choose from, `ConfigError` where the selector needs what is missing,
    `MethodError` where it returns a row twice, one that does not exist or one without a valid score.
    """
    method = resolve(Selector, config.selector, "select.selector")
    quota = Quota.of(config, len(pool))
    whole, pool = pool, pool if kept_K is None else pool.only(kept_K)
    if quota.rows == 0:
        none = Choice(np.empty(0, dtype=np.int64))
        return Chosen(_table(none, whole, target_ids, replayed(none, whole, quota, (), rng)), method, none.rows, quota)
    _require(method, pool)
    if len(whole) and not len(pool):
        raise InputError(
            "a noise filter that lets a row pass", f"it dropped all {len(whole)}", "lower or set `select.noise.drop`"
        )
    usable = pool.usable(method.needs())
    if not len(usable):
        raise InputError(
            f"at least one row with what {method.name()} reads ({', '.join(sorted(method.needs())) or 'nothing'})",
            f"none of {len(pool)} rows has it" if len(pool) else "the pool has no rows",
            "look at the quarantine of the score stage",
        )
    law = None if config.repetition is None else resolve(Repetition, config.repetition, "select.repetition")
    curves: dict[str, Curve] = {}

    def pick(among: Candidates, own: Quota, part: str) -> Choice:
        choice = method.select(among, own, rng)
        _guard(method, among, usable if among is pool else among.usable(method.needs()), choice)
        if law is not None:
            choice, curve = law.repeat(among, own, choice, passes)
            if curve is not None:
                curves[part] = curve
        return choice

    if parts:
        choice = choose_parts(pool, usable, quota, parts, pick, notice, repeats=law is not None)
    else:
        choice = pick(pool, quota, "")
    if choice.short:
        notice(f"{len(choice.rows)} rows were chosen of {quota.asked}: {choice.short}")
    elif not parts and law is None and _left_out(choice.rows, quota, pool, usable):
        notice(f"{len(choice.rows)} rows were chosen of {quota.asked}: {method.name()} as set considers no more")
    if not parts and law is None:
        missing = "no feature" if "features" in method.needs() else "no valid score"
        whose = "the pool" if kept_K is None else "what the noise filter left"
        _say_short(choice.rows, quota, pool, usable, missing, whose, notice)
    again = replayed(choice, pool, quota, parts, rng)
    if kept_K is not None:
        choice = replace(choice, rows=kept_K[choice.rows])
    return Chosen(_table(choice, whole, target_ids, again), method, choice.rows, quota, curves, len(again[0]))


def _require(method: Selector, pool: Candidates) -> None:
    """Raise `ConfigError` where a selector reads what the pool does not have at all."""
    name = method.name()
    if method.needs() & {"scores", "groups"} and pool.score_N is None:
        raise ConfigError(f"selector {name} is given scores", "there are none", "score the pool first, or use `random`")
    if "groups" in method.needs() and pool.column_NJ is None:
        raise ConfigError(
            f"selector {name} is given a score for each of several target groups",
            "there is one group",
            "set `score.groups: source` where the target has several sources, or use `top_k` over `score`",
        )
    if "features" in method.needs() and pool.features is None and pool.similarity_NN is None:
        raise ConfigError(
            f"selector {name} is given features",
            "scoring left none",
            "set `store_bits: 8` in `score.scorer` of a method that makes them, such as `less`",
        )


def _guard(method: Selector, pool: Candidates, usable: np.ndarray, choice: Choice) -> None:
    rows = np.asarray(choice.rows)
    promised = f"selector {method.name()} returns rows of the pool, each once"
    if not len(rows):
        raise MethodError(promised, "it chose none", "choose at least one row")
    if len(np.unique(rows)) != len(rows):
        raise MethodError(promised, f"{len(rows) - len(np.unique(rows))} rows came twice", "use `repeats` instead")
    if rows.min() < 0 or rows.max() >= len(pool):
        raise MethodError(promised, f"row {rows.max()} of {len(pool)}", "return row numbers of the pool")
    if not np.isin(rows, usable).all():
        raise MethodError(promised, "a row without what it reads was chosen", "choose among `pool.usable`")
    for name in ("gain", "weights", "repeats", "order", "group"):
        values = getattr(choice, name)
        if values is not None and (len(values) != len(rows) or not np.isfinite(values).all()):
            raise MethodError(promised, f"`{name}` has {len(values)} values, or one not finite", "one number a row")


def _left_out(taken: np.ndarray, quota: Quota, pool: Candidates, usable: np.ndarray) -> bool:
    """Return whether the quota had room for any of the usable rows that were not taken."""
    rest = np.setdiff1d(usable, taken, assume_unique=True)
    if not len(rest):
        return False
    if quota.rows is not None:
        return len(taken) < quota.rows
    assert quota.tokens is not None
    assert pool.lengths_N is not None
    held, longest = int(pool.lengths_N[taken].sum(dtype=np.int64)), int(pool.lengths_N[rest].max())
    return held + longest <= quota.tokens


def _say_short(
    taken: np.ndarray,
    quota: Quota,
    pool: Candidates,
    usable: np.ndarray,
    missing: str,
    whose: str,
    notice: Callable[[str], None],
) -> None:
    """Say so where the pool ended before the quota did."""
    if len(taken) < len(usable) or not quota.wants_more(taken, pool.lengths_N):
        return
    invalid = len(pool) - len(usable)
    wanted = quota.rows if quota.rows is not None else len(pool)
    if invalid and len(taken) < wanted:
        verb = "row has" if invalid == 1 else "rows have"
        notice(f"only {len(taken)} of {wanted} could be filled: {invalid} {verb} {missing}")
    else:
        notice(f"the budget ({quota.asked}) is larger than {whose}: all {len(taken)} rows were taken")


def _table(
    choice: Choice, pool: Candidates, target_ids: Sequence[str], again: tuple[np.ndarray, np.ndarray]
) -> pa.Table:
    """Return the chosen rows, those `again` in a later phase (places and phases), and in the last one the target."""
    rows, (places, phases) = choice.rows, again
    ids = pool.ids.take(pa.array(rows)).to_pylist()
    chosen = set(ids)
    extra = [example_id for example_id in target_ids if example_id not in chosen]
    more = len(places) + len(extra)
    count = len(rows) + more
    order = np.zeros(len(rows), np.int32) if choice.order is None else choice.order
    weights, sources = _or_ones(choice.weights, len(rows)), pool.sources.take(pa.array(rows)).to_pylist()
    last = np.full(len(extra), order.max(initial=0))
    ranks = np.arange(count, dtype=np.int32)
    scores = [None] * len(rows) if pool.score_N is None else [f"{value:.6g}" for value in pool.score_N[rows]]
    gain: list[Any] = [None] * len(rows) if choice.gain is None else np.asarray(choice.gain).tolist()
    shown = ["" if value is None else f"{value:.6g}" for value in gain]
    reasons = [
        choice.reason.format(score=score, rank=rank, gain=value, group=group)
        for rank, (score, value, group) in enumerate(zip(scores, shown, _groups(choice), strict=True))
    ]
    columns = {
        "rank": ranks,
        "example_id": ids + [ids[place] for place in places] + extra,
        "weight": np.concatenate([weights, weights[places], np.ones(len(extra))]).astype(np.float32),
        "repeats": np.concatenate([_or_ones(choice.repeats, len(rows)), np.ones(more)]).astype(np.int32),
        "order": np.concatenate([order, phases, last]).astype(np.int32),
        "mixture": sources + [sources[place] for place in places] + ["target"] * len(extra),
        "gain": gain + [None] * more,
        "reason": [
            *reasons,
            *["replayed from an earlier phase"] * len(places),
            *["a row of the target, trained on as configured"] * len(extra),
        ],
    }
    arrays = [pa.array(columns[name], type=SELECTION.schema.field(name).type) for name in SELECTION.schema.names]
    return pa.Table.from_arrays(arrays, schema=SELECTION.schema)


def _groups(choice: Choice) -> list[str]:
    """Return the name of each row's group; names are shared, not copied."""
    if choice.group is None:
        return [""] * len(choice.rows)
    names = choice.groups or [str(number + 1) for number in range(int(choice.group.max(initial=-1)) + 1)]
    return [names[number] for number in choice.group.tolist()]


def _or_ones(values: np.ndarray | None, count: int) -> np.ndarray:
    return np.ones(count) if values is None else np.asarray(values)
