"""A mixture filled: each part of the pool gets its share of the quota, and the selector chooses within the part.

Shares come from the artifact `mixture`, made elsewhere. What a part cannot fill goes to the others in proportion; ranks
interleave the parts, so that every prefix of the selection is near the mixture. A part of a later phase is introduced
after those of earlier ones, some of whose rows are trained on again with it (replay). Torch-free. P parts, S rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from data_contracts.errors import BudgetError, InputError
from stages.select.quota import Quota
from stages.select.selector import Candidates, Choice

Pick = Callable[[Candidates, Quota, str], Choice]
"""Chooses from candidates within a quota, for a part of that name."""


@dataclass(frozen=True)
class Part:
    """One part of a mixture: its share of the quota, its phase, and rows replayed in it for one of its own."""

    name: str
    share: float
    phase: int = 0
    replay: float = 0.0


def parts_of(table: pa.Table) -> tuple[Part, ...]:
    """Return the parts with a share above zero of an artifact `mixture`."""
    rows = table.select(["part", "share", "phase", "replay"]).to_pylist()
    return tuple(Part(row["part"], row["share"], row["phase"], row["replay"]) for row in rows if row["share"] > 0)


def apportion(total: int, share_P: np.ndarray, most_P: np.ndarray) -> np.ndarray:
    """Return how many of `total` units each part gets, int64, none above `most_P`.

    In proportion to the shares; what a part cannot take is shared by the rest again; rounded by largest remainders,
    ties to the first. Sums to the smaller of `total` and the sum of `most_P` over parts with a share.
    """
    exact_P = np.zeros(len(share_P))
    open_P = (share_P > 0) & (most_P > 0)
    while open_P.any():
        left = total - exact_P[~open_P].sum()
        exact_P[open_P] = left * share_P[open_P] / share_P[open_P].sum()
        over_P = open_P & (exact_P > most_P)
        if not over_P.any():
            break
        exact_P[over_P] = most_P[over_P]
        open_P &= ~over_P
    whole_P: np.ndarray = np.floor(exact_P + 1e-9).astype(np.int64)
    rest_P = np.where(whole_P < most_P, exact_P - whole_P, -1.0)
    missing = min(round(exact_P.sum()), total) - int(whole_P.sum())
    whole_P[np.argsort(-rest_P, kind="stable")[:missing]] += 1
    return whole_P


def choose_parts(
    pool: Candidates,
    usable: np.ndarray,
    quota: Quota,
    parts: Sequence[Part],
    pick: Pick,
    notice: Callable[[str], None],
    *,
    repeats: bool,
) -> Choice:
    """Return the choice from all parts, its ranks interleaved, its phases set.

    Args:
        pool: the candidates; `usable` are those that the selector may take.
        quota: of the whole selection, replay included.
        parts: of the mixture.
        pick: chooses within a part.
        notice: told where the mixture could not be had.
        repeats: whether a part may use more of the quota than it has rows, by repeating them.

    Raises `InputError` where no part has a usable row.
    """
    source_N = pool.sources.combine_chunks().dictionary_encode()
    code_N, names = source_N.indices.to_numpy(), source_N.dictionary.to_pylist()
    code_of = {name: code for code, name in enumerate(names)}
    rows = [usable[code_N[usable] == code_of.get(part.name, -1)] for part in parts]
    if not any(len(found) for found in rows):
        raise InputError(
            "a part of the mixture has rows that can be chosen",
            f"none of {', '.join(part.name for part in parts) or 'its parts'} has",
            "name sources of the pool in `select.mixture`",
        )
    share_P = np.array([part.share for part in parts])
    got_P = _quotas(pool, quota, parts, rows, share_P, repeats)
    choices, taken = [], []
    for part, found, units in zip(parts, rows, got_P.tolist(), strict=True):
        if not units:
            continue
        asked = f"{units} {'rows' if quota.rows is not None else 'tokens'} of {part.name}"
        own = Quota(units, None, asked) if quota.rows is not None else Quota(None, units, asked)
        try:
            choice = pick(pool.only(found), own, part.name)
        except BudgetError:
            notice(f"{part.name} gets nothing: its share is {units} tokens, and its best row has more")
            continue
        choices.append(replace(choice, rows=found[choice.rows]))
        taken.append(part)
    wanted_P = share_P / share_P.sum()
    have_P = got_P / max(1, got_P.sum())
    for part, want, have in zip(parts, wanted_P.tolist(), have_P.tolist(), strict=True):
        if have < want - 0.01:
            notice(f"{part.name} has too few rows for its share: {have:.1%} in place of {want:.1%}; the rest got it")
    if not choices:
        raise BudgetError("a part's share holds its best row", f"none of {quota.asked} does", "raise the quota")
    return _merged(choices, taken)


def _quotas(
    pool: Candidates,
    quota: Quota,
    parts: Sequence[Part],
    rows: Sequence[np.ndarray],
    share_P: np.ndarray,
    repeats: bool,
) -> np.ndarray:
    """Return each part's units, so that with their replays they are the quota's."""
    total = quota.rows if quota.rows is not None else quota.tokens
    assert total is not None
    first = min(part.phase for part in parts)
    replayed = sum(part.share * part.replay for part in parts if part.phase > first) / float(share_P.sum())
    if quota.rows is not None:
        most = [len(found) for found in rows]
    else:
        assert pool.lengths_N is not None or not any(len(found) for found in rows)
        most = [0 if pool.lengths_N is None else int(pool.lengths_N[found].sum(dtype=np.int64)) for found in rows]
    if repeats:
        most = [total if units else 0 for units in most]
    return apportion(max(1, round(total / (1 + replayed))), share_P, np.array(most, dtype=np.int64))


def _merged(choices: Sequence[Choice], parts: Sequence[Part]) -> Choice:
    place_S = np.concatenate([(np.arange(len(choice.rows)) + 0.5) / len(choice.rows) for choice in choices])
    order_S = np.argsort(place_S, kind="stable")
    phases = sorted({part.phase for part in parts})
    inner = [np.zeros(len(choice.rows), np.int64) if choice.order is None else choice.order for choice in choices]
    width = 1 + max(int(order.max()) for order in inner)
    later = [phases.index(part.phase) * width + order for part, order in zip(parts, inner, strict=True)]

    def joined(name: str, default: float) -> np.ndarray | None:
        values = [getattr(choice, name) for choice in choices]
        if all(value is None for value in values):
            return None
        filled = [
            np.full(len(choice.rows), default) if value is None else np.asarray(value)
            for choice, value in zip(choices, values, strict=True)
        ]
        return np.concatenate(filled)[order_S]

    found = [choice.group for choice in choices if choice.group is not None]
    grouped = len(found) == len(choices)
    names = [
        [*choice.groups] or [str(number + 1) for number in range(int(own.max(initial=-1)) + 1)]
        for choice, own in zip(choices, found, strict=False)
    ]
    starts = np.cumsum([0, *(len(own) for own in names)])
    group = [own + start for own, start in zip(found, starts, strict=False)]
    return Choice(
        np.concatenate([choice.rows for choice in choices])[order_S],
        gain=joined("gain", 0.0),
        weights=joined("weights", 1.0),
        repeats=joined("repeats", 1),
        order=np.concatenate(later)[order_S].astype(np.int32),
        reason=choices[0].reason,
        group=np.concatenate(group)[order_S] if grouped else None,
        groups=tuple(name for own in names for name in own) if grouped else (),
        short="; ".join(
            f"{part.name}: {choice.short}" for part, choice in zip(parts, choices, strict=True) if choice.short
        ),
    )


def replayed(
    choice: Choice, pool: Candidates, quota: Quota, parts: Sequence[Part], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return (places in `choice`, their phases) of the rows trained on again in a later phase.

    For a part of a later phase, `replay` times its rows (its tokens, under a quota of tokens) are drawn at random from
    what was introduced before, a row at most once a phase.
    """
    places, phases = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int32)]
    if choice.order is None or not any(part.replay for part in parts):
        return places[0], phases[0]
    rows = choice.rows
    unit_S = np.ones(len(rows), np.int64) if quota.tokens is None or pool.lengths_N is None else pool.lengths_N[rows]
    source_S = np.array(pool.sources.take(pa.array(rows)).to_pylist())
    for phase in np.unique(choice.order)[1:].tolist():
        own_S = choice.order == phase
        wanted = sum(part.replay * float(unit_S[own_S & (source_S == part.name)].sum()) for part in parts)
        before = rng.permutation(np.flatnonzero(choice.order < phase))
        drawn = np.sort(before[: int(np.searchsorted(np.cumsum(unit_S[before]), wanted + 0.5, side="right"))])
        places.append(drawn)
        phases.append(np.full(len(drawn), phase, dtype=np.int32))
    return np.concatenate(places), np.concatenate(phases)
