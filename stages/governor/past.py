"""How good past quotes were, against what the runs that followed came to. Pure: quotes and outcomes in, scores out.

A probability is scored by Brier's mean squared error: 0 is perfect, 0.25 what one half always gets. It needs both a run
that chose and one that did not, at one budget; without the second nobody knows. An 80 % interval is scored by how often
it holds what came: 80 % of times where it is honest, more where it is too wide. Source: Brier 1950; Gneiting & Raftery
2007, sections 3 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import Field

from data_contracts.cost import Frozen
from data_contracts.quotes import Hours, Offer, Quote, Span


class Came(Frozen):
    """What came of the run that followed a quote; None is not known."""

    loss: float | None = Field(None, description="Best validation loss.")
    flops: float | None = None
    seconds: float | None = Field(None, description="Of all its stages.")
    joules: float | None = None
    won: bool | None = Field(None, description="Whether the quoted choice ended below chance, both having been run.")


class Scores(Frozen):
    """Scores of past quotes."""

    quotes: int = Field(ge=0, description="That a run followed.")
    brier: float | None = Field(None, ge=0, le=1)
    judged: int = Field(0, ge=0, description="Probabilities that could be judged.")
    held: int = Field(0, ge=0, description="Intervals that held what came.")
    intervals: int = Field(0, ge=0)
    by_number: dict[str, tuple[int, int]] = Field(default_factory=dict, description="(held, intervals) of each kind.")

    @property
    def coverage(self) -> float | None:
        """The share of intervals that held what came."""
        return self.held / self.intervals if self.intervals else None


def score(past: Iterable[tuple[Quote, Hours, Came]]) -> Scores:
    """Return the scores of quotes that a run followed: each with its hours, and what came."""
    errors: list[float] = []
    found: dict[str, list[bool]] = {}
    count = 0
    for quote, hours, came in past:
        count += 1
        chosen = choice(quote)
        if chosen is not None and chosen.probability is not None and came.won is not None:
            errors.append((chosen.probability.expected - came.won) ** 2)
        for name, (expected, value) in _pairs(quote, hours, came).items():
            found.setdefault(name, []).append(expected.holds(value))
    by_number = {name: (sum(held), len(held)) for name, held in sorted(found.items())}
    return Scores(
        quotes=count,
        brier=sum(errors) / len(errors) if errors else None,
        judged=len(errors),
        held=sum(held for held, _ in by_number.values()),
        intervals=sum(of for _, of in by_number.values()),
        by_number=by_number,
    )


def choice(quote: Quote) -> Offer | None:
    """Return the offer that the quote's probability is of: what the run follows, or where that is chance the likeliest.

    None where none has a probability.
    """
    known = [offer for offer in quote.offers if offer.probability is not None]
    followed = [offer for offer in known if offer.arm == quote.follows]
    return max(
        followed or known, key=lambda offer: offer.probability.expected if offer.probability else 0, default=None
    )


def joules(seconds: Span, watts: float) -> Span:
    """Return the energy of so many seconds."""
    return Span(expected=seconds.expected * watts, low=seconds.low * watts, high=seconds.high * watts)


def _pairs(quote: Quote, hours: Hours, came: Came) -> Mapping[str, tuple[Span, float]]:
    offer, seconds = quote.offer(quote.follows), hours.seconds[quote.follows]
    pairs = {
        "loss": (offer.loss, came.loss),
        "FLOPs": (offer.flops, came.flops),
        "time": (seconds, came.seconds),
        "energy": (None if hours.watts is None else joules(seconds, hours.watts), came.joules),
    }
    return {name: (one, other) for name, (one, other) in pairs.items() if one is not None and other is not None}
