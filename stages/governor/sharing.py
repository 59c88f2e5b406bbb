"""Several runs, one pot: what each should get of it, what that is expected to bring, and who is told nothing.

A pot is of FLOPs, hours or money; a run turns it into FLOPs of training at its own rate. Runs whose curve falls are
filled to one marginal gain (`allocation.py`, on the draws of each run's fit), which makes the expected sum of weighted
losses lowest; one of which too little was seen gets an equal part first, one whose loss does not fall gets nothing.
Losses of different targets are not comparable in nats: what a nat of each is worth is the user's word, by weights.
Pure. Reading runs is left to `flows/sharing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from data_contracts.errors import InputError
from data_contracts.quotes import Span
from stages.governor.allocation import Falling, share
from stages.governor.curve_bank import fit_curve
from stages.governor.gain import rise_since_best, window_of
from stages.governor.state import Point, State

LEAST = 6
"""Evaluations below which a curve is not continued, as the policy `gain_left` has it."""
CONFIDENCE, AGE = 0.95, 2
"""With which a rise must be shown, and how many evaluations ago the best must be."""
TAIL = 0.1
"""Of each side of an interval."""


@dataclass(frozen=True)
class Curve:
    """Draws of L = floor + a·C^−b, (B,) each, C being FLOPs of training since the run's start."""

    floor_B: np.ndarray
    a_B: np.ndarray
    b_B: np.ndarray

    def loss(self, flops: float) -> Span:
        """Return the expected loss at `flops` and its 80 % interval."""
        loss_B = self.floor_B + self.a_B * flops**-self.b_B
        low, high = np.quantile(loss_B, [TAIL, 1 - TAIL])
        mean = float(loss_B.mean())
        return Span(expected=mean, low=min(mean, float(low)), high=max(mean, float(high)))


@dataclass(frozen=True)
class Claim:
    """One run that asks for a part of the pot; amounts are in the pot's unit.

    Args:
        name: of the run.
        trained: FLOPs of training after which it goes on.
        kept: of the pot's stock, what it has spent up to there.
        curve: None where too little was seen.
        rate: what a FLOP of its training takes.
        reserve: share of all that it may spend, `kept` included, that its last evaluation keeps.
        weight: what a nat of its loss is worth.
        most: the most it may get.
        why: why it gets an equal part, or nothing.
    """

    name: str
    trained: float = 0.0
    kept: float = 0.0
    curve: Curve | None = None
    rate: float = 1.0
    reserve: float = 0.0
    weight: float = 1.0
    most: float = math.inf
    why: str = ""

    @property
    def flat(self) -> bool:
        """Whether no draw of its curve falls."""
        return self.curve is not None and not (self.curve.a_B > 0).any()

    @property
    def price(self) -> float:
        """What a FLOP of training takes of the pot, the reserve on it included."""
        return self.rate / (1 - self.reserve)

    @property
    def fee(self) -> float:
        """What must be added before the first FLOP: the reserve on what was spent already."""
        return self.reserve / (1 - self.reserve) * self.kept

    def flops(self, part: float) -> float:
        """Return the FLOPs that it trains with of `part`."""
        return max(0.0, (part - self.fee) / self.price)


@dataclass(frozen=True)
class Portion:
    """What one run gets.

    Args:
        name: of the run.
        part: of the pot.
        flops: of training, that this buys; None where no rate is known.
        loss: expected after them; None where too little was seen.
        gain: nats, times weight, that one more of the pot's unit would bring there.
        why: why it gets an equal part, or nothing; "" where it is filled to the common gain or to its most.
    """

    name: str
    part: float
    flops: float | None
    loss: Span | None
    gain: float | None
    why: str = ""


def curve_of(state: State) -> tuple[Curve | None, str, bool]:
    """Return (the curve of a run's latest segment, why there is none, whether more training has nothing to bring: the
    loss rises, or more is forgotten than is allowed).

    Continued as a power of FLOPs; of the run's whole history where the segment has fewer than `LEAST` evaluations.
    """
    if state.direction != "minimise":
        return None, "its metric is no loss", False
    if state.retained and state.forgot(state.retained):
        return None, "it has forgotten more than is allowed", True
    points: Sequence[Point] = window_of(state, len(state.points) + 1)
    if len(points) < LEAST:
        points = state.evaluations
    seen = [point for point in points if point.flops > 0]
    if len(seen) < LEAST:
        return None, f"{len(seen)} evaluation(s) are too few to continue its curve", False
    rise = rise_since_best(state)
    if rise and rise.beyond(AGE, CONFIDENCE):
        return None, f"its validation loss rises, {rise.nats:.3g} nats above its best: choose data anew first", True
    flops, loss = [float(point.flops) for point in seen], [point.loss or 0.0 for point in seen]
    fitted = fit_curve(flops, loss, np.random.default_rng(0), shapes=("pow3",))
    return (None, "too few evaluations to continue its curve", False) if fitted is None else (
        Curve(*fitted.powers()), "", False)  # fmt: skip


def divide(claims: Sequence[Claim], pot: float) -> tuple[Portion, ...]:
    """Return each claim's portion of `pot`, in the order given; less than the pot where all are at their most.

    A run that gains less than its fee brings the others gets nothing, and they are filled without it. Raises
    `InputError` for an empty pot, equal names, and a weight or rate not above 0.
    """
    names = [claim.name for claim in claims]
    if not claims or not pot > 0 or len(set(names)) < len(names):
        raise InputError("a pot above 0 and runs of different names", f"{pot} for {', '.join(names)}", "name them")
    for claim in claims:
        if not (claim.weight > 0 and claim.rate > 0 and 0 <= claim.reserve < 1 and claim.most >= 0):
            raise InputError(f"weight and rate of {claim.name} above 0", f"{claim}", "give another")
    parts = {claim.name: min(claim.most, pot / len(claims)) for claim in claims if claim.curve is None}
    parts |= {claim.name: 0.0 for claim in claims if claim.most == 0 or claim.flat}
    filled = [claim for claim in claims if claim.name not in parts and claim.most > claim.fee]
    given = _filled(filled, pot - sum(parts.values()))
    return tuple(_portion(claim, parts.get(claim.name, given.get(claim.name, 0.0))) for claim in claims)


def _filled(claims: Sequence[Claim], pot: float) -> dict[str, float]:
    """Return the parts of those that get something; who costs more by its fee than it gains is left out, one by one."""
    best, best_loss, standing = dict[str, float](), _expected(claims, {}), list(claims)
    while standing:
        without = [[other for other in standing if other is not one] for one in standing if one.fee > 0]
        tried = [_parts(some, pot) for some in (standing, *without)]
        losses = [_expected(claims, parts) for parts in tried]
        at = int(np.argmin(losses))
        if losses[at] < best_loss or not best:
            best, best_loss = tried[at], losses[at]
        if at == 0:
            break
        standing = without[at - 1]
    return best


def _parts(claims: Sequence[Claim], pot: float) -> dict[str, float]:
    free = pot - sum(claim.fee for claim in claims)
    if not claims or free <= 0:
        return {}
    return {
        claim.name: claim.fee + float(part) for claim, part in zip(claims, _fill(claims, free), strict=True) if part > 0
    }


def _expected(claims: Sequence[Claim], parts: dict[str, float]) -> float:
    """Return the expected sum of weighted losses above the floors."""
    total = 0.0
    for claim in claims:
        at = claim.trained + claim.flops(parts.get(claim.name, 0.0))
        if claim.curve is not None:
            total += claim.weight * float((claim.curve.a_B * at**-claim.curve.b_B).mean()) if at > 0 else math.inf
    return total


def _fill(claims: Sequence[Claim], pot: float) -> np.ndarray:
    """Return what each gets beyond its fee. In the pot's unit y = c·C a law a·C^−b is a·c^b·y^−b."""
    curves = [claim.curve for claim in claims if claim.curve is not None]
    return share(
        [claim.weight * curve.a_B * claim.price**curve.b_B for claim, curve in zip(claims, curves, strict=True)],
        [curve.b_B for curve in curves],
        pot,
        spent_R=[claim.price * claim.trained for claim in claims],
        most_R=[claim.most - claim.fee for claim in claims],
    ).flops_R


def _gain(claim: Claim, flops: float) -> float:
    """Return what one more of the pot's unit brings after so many FLOPs of training."""
    if claim.curve is None or claim.flat:
        return 0.0
    falling = Falling.of(claim.curve.a_B, claim.curve.b_B)
    return claim.weight * math.exp(falling.log_gain(math.log(flops))) / claim.price


def _portion(claim: Claim, part: float) -> Portion:
    why = claim.why
    if claim.flat and not why:
        why = "its curve is flat"
    elif part == 0 and not why:
        why = "it may get nothing" if claim.most == 0 else "others gain more by all of it"
    elif claim.most < math.inf and part >= claim.most * (1 - 1e-9) and not why:
        why = "the most it may get"
    flops = claim.flops(part)
    if claim.curve is None:
        return Portion(claim.name, part, flops if claim.trained > 0 else None, None, None, why)
    at = claim.trained + flops
    if at <= 0:
        return Portion(claim.name, part, flops, None, None, why)
    return Portion(claim.name, part, flops, claim.curve.loss(at), _gain(claim, at), why)


def nothing(claim: Claim, why: str) -> Claim:
    """Return the claim of a run that gets nothing, and why."""
    return replace(claim, most=0.0, why=why)
