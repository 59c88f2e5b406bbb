"""The joint plan: every way of choosing × share of the pool × way of training × end, in one order. Pure.

It promises a loss only where one can be told: of what a probe trained, of ways of training that do the same arithmetic,
and of other shares of the pool as far as the law of repetition reaches (Muennighoff et al. 2023). Where rows were
chosen that law speaks of fewer of them, taken to be of one worth; what further rows would teach is not known. A row
whose loss is not known says why and stands behind all others, once, at all that may be spent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data_contracts.config import ArmConfig
from data_contracts.quotes import JointOffer, Offer, Span
from data_contracts.records import Plan
from stages.governor.laws.muennighoff import DATA_DECAY, effective
from stages.governor.payback import has_core, kind_of
from stages.governor.quoting import Law

if TYPE_CHECKING:
    from stages.quote.engine import Quoting

KEPT = 40
"""Rows with a loss that a quote keeps of all that were looked at."""
WAYS = 6
"""Ways of training that are crossed: the best of each technique, then the next best."""
TIMED = ("seconds", "money")
"""Limits under which a slower way trains less."""


@dataclass(frozen=True)
class Way:
    """A way of training that fits.

    Attributes:
        name: for people.
        speed: modelled, in that of the plan's way.
        alike: whether it does the plan's arithmetic, step by step: only the grouping of a step's rows is another.
        why: it is not.
    """

    name: str
    speed: float
    alike: bool
    why: str = ""


def joint(quoting: Quoting, offers: Sequence[Offer]) -> tuple[tuple[JointOffer, ...], int]:
    """Return combinations in the order of `objective`, the first `KEPT` and those without a loss, and how many there
    are."""
    ways = ways_of(quoting.plan)
    rows = [row for arm, offer in zip(quoting.arms, offers, strict=True) for row in _of_arm(quoting, arm, offer, ways)]
    order = ranked(rows, quoting.least_gain)
    known = sum(row.loss is not None for row in order)
    return tuple(order[: min(KEPT, known)] + order[known:]), len(rows)


def objective(least_gain: float) -> str:
    """Return in words what the order is."""
    same = f"losses within {least_gain:g} nats of the lowest, and so on down, count as equal" if least_gain else ""
    return f"lowest expected loss within the budget; {same or 'of equal ones'}, fewest hours first"


def ranked(rows: Sequence[JointOffer], least_gain: float) -> list[JointOffer]:
    """Return the rows by expected loss; of those within `least_gain` nats of the lowest left, the quickest first.

    Rows whose loss is not known follow in the order given.
    """
    found: list[JointOffer] = []
    known = sorted((row for row in rows if row.loss), key=_loss)
    while known:
        level = [row for row in known if _loss(row) <= _loss(known[0]) + least_gain]
        found += sorted(level, key=lambda row: (row.flops.expected / row.speed, _loss(row)))
        known = known[len(level) :]
    return found + [row for row in rows if row.loss is None]


def ways_of(plan: Plan) -> tuple[Way, ...]:
    """Return the ways of training that fit, the plan's own first; none where the plan names none."""
    fits = [way for way in plan.considered if way["fits"]]
    mine = next((way for way in fits if way["reason"] == "chosen"), None)
    if mine is None:
        return ()
    firsts = [next(way for way in fits if way["place"] == place) for place in dict.fromkeys(w["place"] for w in fits)]
    taken = [mine, *(way for way in firsts if way is not mine)]
    taken += [way for way in fits if all(way is not other for other in taken)]
    return tuple(_way(way, mine) for way in taken[:WAYS])


def _way(way: dict[str, Any], mine: dict[str, Any]) -> Way:
    others = {
        "place": f"the probes trained {mine['technique']}"
        + (" with other settings" if way["technique"] == mine["technique"] else ""),
        "precision": f"the probes trained in {mine['precision']}",
        "examples": f"the probes made steps of {mine['examples']} rows, not {way['examples']}",
        "savings": "how many rows its FLOPs train on was not counted",
    }
    why = next((said for name, said in others.items() if way[name] != mine[name]), "")
    return Way(name_of(way), float(way["tokens_per_second"]) / float(mine["tokens_per_second"]), not why, why)


def name_of(way: dict[str, Any]) -> str:
    """Return a considered way of training for people."""
    parts = [str(way["technique"]), str(way["precision"]), f"micro-batch {way['micro_batch']}", str(way["savings"])]
    return ", ".join(part for part in parts if part)


def _of_arm(quoting: Quoting, arm: ArmConfig, offer: Offer, ways: Sequence[Way]) -> Iterator[JointOffer]:
    law = quoting.law(arm.name)
    untold = "" if law else "it was not probed"
    for way in ways:
        known = law is not None and way.alike
        for share in quoting.stops(arm.name, law) if law is not None and known else (1.0,):
            part = share * min(1.0, way.speed) if quoting.binding in TIMED else share
            passes = quoting.training(arm.name, part) / max(1, quoting.plan.pass_flops)
            for fraction in shares_of(arm, offer, passes):
                why = untold or way.why or _untried(offer, fraction)
                if why and (share < 1 or (fraction != offer.fraction and not known)):
                    continue  # nothing but its cost is known, and that does not differ
                yield JointOffer(
                    arm=arm.name,
                    fraction=fraction,
                    way=way.name,
                    speed=way.speed,
                    share=share,
                    loss=None if why or law is None else _lost(quoting, arm, law, part, passes, offer, fraction),
                    flops=quoting.flops(arm.name, law, part),
                    flops_known=way.alike,
                    unknown=why,
                )


def shares_of(arm: ArmConfig, offer: Offer, passes: float) -> tuple[float, ...]:
    """Return the shares of the pool to look at: the offer's; half of it; twice it, where its rows are visited again.

    With a core, whose rows are visited otherwise than others, the offer's alone.
    """
    mine = offer.fraction
    if not arm.fraction and has_core(mine, arm.epochs, kind_of(arm)):
        return (mine,)
    more = (min(1.0, 2 * mine),) if mine < min(1.0, passes) else ()
    return (mine, mine / 2, *more)


def _untried(offer: Offer, fraction: float) -> str:
    return "" if offer.chance or fraction <= offer.fraction else "its further rows were not tried"


def _lost(
    quoting: Quoting, arm: ArmConfig, law: Law, part: float, passes: float, offer: Offer, fraction: float
) -> Span:
    """Return the loss with `fraction`: the law at as many FLOPs as its visits are worth beside those of the offer's.

    The interval of another share than the offer's holds that of the offer's too.
    """
    training = quoting.training(arm.name, part)
    mine = law.loss(quoting.start + training)
    if fraction == offer.fraction or not passes:
        return mine
    other = law.loss(quoting.start + training * worth(fraction, passes) / worth(offer.fraction, passes))
    return Span(expected=other.expected, low=min(mine.low, other.low), high=max(mine.high, other.high))


def worth(fraction: float, passes: float) -> float:
    """Return what `passes` over the pool are worth in visits of fresh rows, made on `fraction` of it."""
    return effective(fraction, passes / fraction - 1.0, DATA_DECAY) if fraction < passes else passes


def _loss(row: JointOffer) -> float:
    assert row.loss is not None
    return row.loss.expected
