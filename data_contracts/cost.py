"""What work costs and what may still be spent.

`peak_bytes` is a capacity: costs that follow one another take the larger. FLOPs, tokens, seconds and money are stocks:
they add. FLOPs and tokens are counted and reproducible; seconds, peak bytes and joules are measured where the work ran;
money is what those seconds cost at a price, which is asked when costs are read: a manifest holds none.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Cause = Literal["warm_up", "score", "select", "train", "probe", "eval", "reconfigure", "infer", "ingest"]
CAUSES: tuple[str, ...] = get_args(Cause)
Stock = Literal["flops", "tokens", "seconds", "money"]
STOCKS: tuple[Stock, ...] = get_args(Stock)


class Frozen(BaseModel):
    """A value: immutable, no unknown fields, compared by content."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Cost(Frozen):
    """What some work spent. `a + b` is the cost of doing one after the other."""

    flops: int = Field(0, ge=0, description="Floating-point operations (a multiply-add is two).")
    tokens: int = Field(0, ge=0, description="Tokens that went through a model.")
    seconds: float = Field(0.0, ge=0, description="Wall seconds.")
    money: float = Field(0.0, ge=0, description="In the price's currency; nothing before a `Price` is asked.")
    peak_bytes: int = Field(0, ge=0, description="Largest memory held at one moment.")
    joules: float = Field(0.0, ge=0, description="Energy of the whole machine meanwhile; 0 where it tells none.")

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            flops=self.flops + other.flops,
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
            money=self.money + other.money,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            joules=self.joules + other.joules,
        )

    def over(self, users: int) -> Cost:
        """Return what one of so many users bears: an equal part of every stock; the peak is each one's own."""
        return Cost(
            flops=round(self.flops / users),
            tokens=round(self.tokens / users),
            seconds=self.seconds / users,
            money=self.money / users,
            peak_bytes=self.peak_bytes,
            joules=self.joules / users,
        )


MoneyAnHour = Annotated[float, Field(ge=0, le=10**9, strict=True)]
"""Bounded, so that no sum of hours is beyond all numbers; true is no price."""


class Price(Frozen):
    """What an hour of the machines costs, whatever they do in it."""

    hour: MoneyAnHour = Field(description="Money for an hour of a stage: of all machines that it holds, idle or not.")
    currency: str = Field("USD", pattern=r"^[A-Z]{3}$", description="ISO 4217, for people; nothing is converted.")
    stages: dict[str, MoneyAnHour] = Field({}, description="Stages whose hour costs otherwise: {ingest: 0.1}.")

    def hour_of(self, stage: str) -> float:
        """Return the price of an hour of a stage."""
        return self.stages.get(stage, self.hour)

    def of(self, stage: str, cost: Cost) -> Cost:
        """Return `cost` of a stage with its money: its seconds at the price of an hour."""
        return cost.model_copy(update={"money": cost.seconds / 3600 * self.hour_of(stage)})


class Budget(Frozen):
    """What may be spent; None is unlimited. `peak_bytes` is a capacity and never used up."""

    flops: int | None = Field(None, ge=0, description="Floating-point operations of the whole run.")
    tokens: int | None = Field(None, ge=0, description="Tokens through a model, whole run.")
    seconds: float | None = Field(None, ge=0, description="Wall seconds, whole run.")
    money: float | None = Field(None, ge=0, description="In the price's currency, whole run.")
    peak_bytes: int | None = Field(None, ge=0, description="Memory of one worker's device, bytes.")

    def minus(self, cost: Cost) -> Budget:
        """Return what is left after `cost`; a stock that is overdrawn is left at zero."""
        left = {
            stock: None if getattr(self, stock) is None else max(0, getattr(self, stock) - getattr(cost, stock))
            for stock in STOCKS
        }
        return Budget(peak_bytes=self.peak_bytes, **left)

    def binding(self, need: Cost) -> tuple[str, float] | None:
        """Return (resource, times it would fit) of the resource that `need` runs out of first.

        The number is available / needed (below 1: does not fit); None when nothing limits `need`.
        """
        ratios = {
            name: getattr(self, name) / getattr(need, name)
            for name in (*STOCKS, "peak_bytes")
            if getattr(self, name) is not None and getattr(need, name) > 0
        }
        return min(ratios.items(), key=lambda item: (item[1], item[0])) if ratios else None

    def affords(self, need: Cost) -> bool:
        """Return whether `need` fits every limit."""
        binding = self.binding(need)
        return binding is None or binding[1] >= 1.0
