"""The ledger: who spent what, as a fold over manifests. It is not stored anywhere.

A run's ledger takes every manifest that its artifacts descend from, each identity once, plus attempts that were lost.
What an adopted commit had cost is charged to the run's decisions and shown apart from what was spent now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from data_contracts.cost import Cost, Frozen, Price

START = "start_from"
"""The input that names what a run goes on from."""
BEYOND = frozenset({START, "earlier_target", "earlier_scores"})
"""Inputs that may be another run's work: no ledger reaches beyond them. What of it is this run's comes by others."""


TRAINING = (("begin", "warm_up"), ("train", "train"), ("train", "probe"))
"""(stage, cause) of training on the run's own weights."""


class Entry(NamedTuple):
    """One attempt's share: the identity it worked on, its run, its stage, its costs by cause, and what it made.

    `content` is one name for all that it made, "" where that is not known.
    """

    identity: str
    run: str
    stage: str
    costs: dict[str, Cost]
    lost: bool = False
    content: str = ""


class Ledger(Frozen):
    """Costs by (stage, cause) of a set of attempts."""

    charges: tuple[tuple[str, str, Cost], ...] = ()

    @classmethod
    def fold(cls, entries: Iterable[Entry]) -> Ledger:
        """Add up entries: a committed identity counts once, every lost attempt counts; order does not matter.

        Work of one stage that made the same of the same by another identity counts once too: what a run adopts for its
        content descends from the run that made it first, and what both trained was needed once.
        """
        seen: set[str] = set()
        sums: dict[tuple[str, str], Cost] = {}
        for entry in sorted(entries, key=lambda item: (item.lost, item.identity, item.run)):
            key = f"lost:{entry.run}" if entry.lost else entry.identity
            content = f"made:{entry.stage}:{entry.content}" if entry.content else key
            known = key in seen or content in seen
            seen |= {key, content}
            if known:
                continue
            for cause, cost in entry.costs.items():
                slot = (entry.stage, cause)
                sums[slot] = sums.get(slot, Cost()) + cost
        return cls(charges=tuple((stage, cause, cost) for (stage, cause), cost in sorted(sums.items())))

    def priced(self, price: Price | None) -> Ledger:
        """Return the same charges with what they cost in money; unchanged without a price."""
        if price is None:
            return self
        return Ledger(charges=tuple((stage, cause, price.of(stage, cost)) for stage, cause, cost in self.charges))

    @property
    def total(self) -> Cost:
        """The cost of everything, peak taken as the largest."""
        total = Cost()
        for _, _, cost in self.charges:
            total += cost
        return total

    def training(self) -> Cost:
        """Return what warm-up, probes of ways of choosing and segments cost: a FLOP's seconds and money in training.

        A mixture's probes train adapters of their own and may be found again without being trained: they tell no rate.
        """
        return sum((cost for stage, cause, cost in self.charges if (stage, cause) in TRAINING), Cost())

    def by_stage(self) -> dict[str, Cost]:
        """Return the cost of each stage."""
        return self._by(0)

    def by_cause(self) -> dict[str, Cost]:
        """Return the cost of each cause."""
        return self._by(1)

    def _by(self, position: int) -> dict[str, Cost]:
        sums: dict[str, Cost] = {}
        for charge in self.charges:
            name = str(charge[position])
            sums[name] = sums.get(name, Cost()) + charge[2]
        return sums
