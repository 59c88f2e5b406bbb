"""Quotes: what a run is expected to come to, told before it is paid for, with an 80 % interval to each number.

A quote holds what equal inputs give again; how long a run takes and what it draws (`Hours`) is measured and lies beside
it. Money is neither: it is asked of a price when a quote is shown. How the numbers are told is the stage `quote`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from data_contracts.cost import Frozen

HOURS_FILE = "hours.json"
"""Measured beside a quote: its `Hours`."""


class Span(Frozen):
    """A number that is not known: what is expected, and the 80 % interval."""

    expected: float
    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Span:
        if not self.low <= self.expected <= self.high:
            raise ValueError("low, expected and high rise")
        return self

    def times(self, factor: float) -> Span:
        """Return the span of `factor` (at least 0) times the number."""
        return Span(expected=self.expected * factor, low=self.low * factor, high=self.high * factor)

    def __add__(self, other: Span) -> Span:
        """Return the sum of two numbers that rise and fall together."""
        return Span(expected=self.expected + other.expected, low=self.low + other.low, high=self.high + other.high)

    def holds(self, value: float) -> bool:
        """Return whether the interval holds `value`."""
        return self.low <= value <= self.high


def summed(spans: Iterable[Span]) -> Span:
    """Return the sum of numbers that rise and fall together."""
    return sum(spans, Span(expected=0.0, low=0.0, high=0.0))


class Offer(Frozen):
    """One way of choosing, and what a run that takes it is expected to come to."""

    arm: str
    scorer: dict[str, Any]
    coverage: dict[str, Any]
    selector: dict[str, Any]
    fraction: float = Field(gt=0, le=1, description="Of the pool's rows.")
    basis: Literal["probes", "words", "nothing"] = Field(description="What `probability` was told from.")
    probability: Span | None = Field(None, description="That it ends below chance; None: not known, or it is chance.")
    gain: Span | None = Field(None, description="Nats that it ends below chance; None: not known.")
    loss: Span | None = Field(None, description="Best validation loss of the run; None: not known.")
    price_flops: int = Field(ge=0, description="Choosing this way from the whole pool, from here on.")
    flops: Span = Field(description="Of the whole run, what was spent before the quote included.")

    @property
    def chance(self) -> bool:
        """Whether it chooses nothing: rows by chance."""
        return self.selector.get("method") == "random"

    def takes(self, score: Mapping[str, Any], select: Mapping[str, Any]) -> bool:
        """Return whether a run with these sections chooses as this offer does, however much of the pool it takes."""
        if self.chance or select["selector"].get("method") == "random":
            return self.chance and select["selector"].get("method") == "random"
        mine = (self.scorer, self.coverage, self.selector)
        return mine == (score["scorer"], score["coverage"], select["selector"])


class StopOffer(Frozen):
    """A share of what may be spent at which training may end."""

    share: float = Field(gt=0, le=1)
    loss: Span
    flops: Span


class JointOffer(Frozen):
    """One way of choosing, so much of the pool, one way of training, ended at one share of what may be spent."""

    arm: str
    fraction: float = Field(gt=0, le=1, description="Of the pool's rows.")
    way: str = Field(description="Of training: technique, precision, micro-batch and what memory is saved by.")
    speed: float = Field(gt=0, description="Of that way, modelled, in that of the plan's.")
    share: float = Field(gt=0, le=1, description="Of what may be spent.")
    loss: Span | None = Field(None, description="Best validation loss; None: not known, `unknown` says why.")
    flops: Span = Field(description="Of the whole run; where the way's own are not known, the plan's for these rows.")
    flops_known: bool = Field(description="Whether the way takes as many FLOPs a row as the plan's.")
    unknown: str = Field("", description="Why the loss is not known.")

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"{self.arm} with {self.fraction:.1%} of the pool, {self.way}, {self.share:.0%} of what may be spent"


class Quote(Frozen):
    """What a run is expected to come to, before it is paid for; every number it was told from stands in its inputs."""

    offers: tuple[Offer, ...] = Field(min_length=1, description="Chance first.")
    follows: str = Field(description="The offer that the run as configured takes.")
    best: str = Field(description="The offer that pays, as it was weighed or, where that was not tried, as words tell.")
    stops: tuple[StopOffer, ...] = Field((), description="Of `best`, least first; the last is all that may be spent.")
    stop_share: float | None = Field(None, description="The least share from which the rest brings next to nothing.")
    joint: tuple[JointOffer, ...] = Field((), description="The first of all combinations, in the order of `objective`.")
    combinations: int = Field(0, ge=0, description="How many were looked at.")
    objective: str = Field("", description="What `joint` is ordered by, in words.")
    spendable_flops: int = Field(ge=0, description="What choosing and training may spend, probes included.")
    probe_flops: int = Field(ge=0, description="What the quote spent on probes.")
    warm_up_flops: int = Field(ge=0, description="What the warm-up took, a run's own first step; 0 without one.")
    unknown: tuple[str, ...] = Field((), description="What is not known, and why.")

    def offer(self, name: str) -> Offer:
        """Return the offer of an arm."""
        return next(item for item in self.offers if item.arm == name)


class Hours(Frozen):
    """How long a quoted run takes, and what it draws; measured beside a quote, and no part of its digest."""

    basis: Literal["timed", "modelled"] = Field(description="Timed on this quote's own steps, or the plan's model.")
    seconds: dict[str, Span] = Field(description="Of all of a run's stages together, by offer.")
    stages: dict[str, dict[str, Span]] = Field({}, description="The same by offer and stage: they add up to it.")
    joint: tuple[dict[str, Span], ...] = Field((), description="By stage, of each of the quote's `joint`.")
    ways: dict[str, Span] = Field(description="The same of `best`, by way of training that fits.")
    seconds_a_flop: Span
    watts: float | None = Field(description="As the machine told while it trained; None: it tells none.")
