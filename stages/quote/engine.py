"""The engine of quoting: one offer a way of choosing, where its training may end, and which offer a run takes.

An offer that was probed is told from its probe, one whose choice words tell of from those, another not at all: then its
loss and its chance are None and the quote says why. What a run spends follows from where its policy would end it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.config import ArmConfig
from data_contracts.method import resolve
from data_contracts.quotes import HOURS_FILE, Offer, Quote, Span, StopOffer
from data_contracts.records import Decision, Likeness, Plan, Summary, WeighedArm, Weighing
from stages.governor.payback import RESAMPLES, budget_fraction, expected_price, fit_slope, moves_enough
from stages.governor.policy import Policy
from stages.governor.quoting import Law, by_probes, by_words, modelled_limit
from stages.quote.hours import MODELS_EVALUATED, hours_of
from stages.quote.joint import joint, objective
from stages.quote.page import joint_table, show
from stages.quote.stage import QuoteSlice
from stages.stage import Inputs, Work

SHARES = (0.25, 0.5)
NEXT_TO_NOTHING = 0.005
"""Nats: what the rest must bring where the policy names no threshold of its own."""


def write_quote(config: QuoteSlice, inputs: Inputs, work: Work) -> Summary:
    """Write `quote` with its hours and its page."""
    quoting = Quoting(config, inputs, work)
    quote = quoting.quote()
    work.record("quote", quote)
    hours = hours_of(quote, quoting.plan, quoting.decision, quoting.evaluation, inputs, work)
    work.measured("quote", HOURS_FILE).write_text(hours.model_dump_json(), encoding="utf-8")
    chosen = quote.offer(quote.follows)
    summary = Summary(
        title=f"quote: {quote.follows}",
        facts={
            "a run takes": quote.follows,
            "lowest expected loss": quote.best,
            "expected loss": chosen.loss.expected if chosen.loss else None,
            "expected FLOPs": round(chosen.flops.expected),
            "best combination": quote.joint[0].title if quote.joint and quote.joint[0].loss else None,
            "FLOPs of probes": quote.probe_flops,
            "FLOPs of the warm-up": quote.warm_up_flops,
        },
        measured={"expected seconds": hours.seconds[quote.follows].expected, "watts": hours.watts},
        tables=(joint_table(quote),) if quote.joint else (),
        notices=quote.unknown,
    )
    show(quote, hours, quoting.plan, [item.table() for item in inputs.all("curve")], summary, work)
    return summary


class Quoting:
    """What the offers of one quote have in common."""

    def __init__(self, config: QuoteSlice, inputs: Inputs, work: Work) -> None:
        self.config, self.inputs = config, inputs
        self.arms = config.auto.arms
        self.plan = inputs.one("plan").record(Plan)
        given = inputs.maybe("decision")
        self.decision = given.record(Decision) if given else None
        found = inputs.maybe("weighing") or inputs.maybe("trial")
        self.races = inputs.maybe("weighing") is not None
        self.weighing = found.record(Weighing) if found else None
        told = [item.record(Likeness) for item in inputs.all("likeness")]
        self.likeness = dict(zip((arm.name for arm in self.arms[1:]), told, strict=False))
        self.before = work.spent(given.ref).total.flops if given else 0
        self.probes = work.spent(found.ref).total.flops - self.before if found else 0
        trained = work.spent(given.ref).by_cause() if given else {}
        self.warm_up = sum(trained[cause].flops for cause in ("warm_up", "eval") if cause in trained)
        self.limit = self._limit()
        self.binding = self.decision.numbers.get("binding") if self.decision else None
        self.start, self.slope, self.slope_se = self._curves()
        holdout = inputs.maybe("holdout_tokens")
        tokens = int(holdout.table().column("n_tokens").to_numpy().sum()) if holdout else 0
        self.evaluation = MODELS_EVALUATED * self.plan.flops_per_token_forward * tokens
        policy = resolve(Policy, config.govern.policy, "govern.policy")
        self.least_gain = float(getattr(policy, "min_gain_nats", 0.0))

    def _limit(self) -> float:
        if self.decision is None:
            budget = self.config.budget
            return modelled_limit(budget.limits, budget.price, self.plan, self.config.govern.evaluation_share)
        limit: Any = self.decision.numbers.get("spendable_flops")
        return float(self.plan.pass_flops if limit is None else limit)

    def _curves(self) -> tuple[float, float, float]:
        """Return (x at the warm-up's end, slope, its standard error), of all evaluations since the base's own.

        x are FLOPs of training since the run's start, and a step.
        """
        curves = [evaluations(item.table()) for item in self.inputs.all("curve")]
        if self.decision is None or not curves or not len(curves[0][0]):
            return 0.0, 0.0, 0.0
        step = float(self.decision.numbers.get("step_flops") or 1)
        warm_P, _ = curves[0]
        x_P = [warm_P - warm_P[0] + step, *(warm_P[-1] - warm_P[0] + step + flops_P for flops_P, _ in curves[1:])]
        slope, error = fit_slope([(np.concatenate(x_P), np.concatenate([loss_P for _, loss_P in curves]))])
        return float(x_P[0][-1]), slope, error

    def quote(self) -> Quote:
        """Return the quote."""
        offers = tuple(self._offer(arm) for arm in self.arms)
        sections = self.config.score.model_dump(mode="json"), self.config.select.model_dump(mode="json")
        follows = next((offer.arm for offer in offers if offer.takes(*sections)), offers[0].arm)
        best = self._best(offers)
        law = self.law(best)
        combined, combinations = joint(self, offers)
        return Quote(
            offers=offers,
            follows=follows,
            best=best,
            stops=self._stops(best, law) if law else (),
            stop_share=self.share(best, law) if law else None,
            joint=combined,
            combinations=combinations,
            objective=objective(self.least_gain) if combined else "",
            spendable_flops=int(self.limit),
            probe_flops=self.probes,
            warm_up_flops=self.warm_up,
            unknown=tuple(self._unknown(offers)),
        )

    def _offer(self, arm: ArmConfig) -> Offer:
        chance = arm.selector.get("method") == "random"
        weighed, likeness, law = self._weighed(arm.name), self.likeness.get(arm.name), self.law(arm.name)
        price = self._price(arm.name)
        probability: Span | None = None
        gain: Span | None = None
        if weighed is not None and not chance:
            probability = by_probes(weighed.probability, RESAMPLES)
            ends = sorted((weighed.gain_low, weighed.gain, weighed.gain_high))
            gain = Span(expected=weighed.gain, low=ends[0], high=ends[2])
        elif likeness is not None:
            probability = by_words(likeness)
        fraction = weighed.fraction if weighed else arm.fraction
        return Offer(
            arm=arm.name,
            scorer=arm.scorer,
            coverage=arm.coverage,
            selector=arm.selector,
            fraction=fraction or budget_fraction(max(1.0, self.limit - price), self.plan.pass_flops, arm.epochs),
            basis="probes" if weighed else "words" if likeness else "nothing",
            probability=probability,
            gain=gain,
            loss=law.loss(self.start + self.training(arm.name)) if law else None,
            price_flops=price,
            flops=self.flops(arm.name, law),
        )

    def _weighed(self, name: str) -> WeighedArm | None:
        arms = self.weighing.arms if self.weighing else ()
        return next((arm for arm in arms if arm.name == name), None)

    def law(self, name: str) -> Law | None:
        arm = self._weighed(name)
        if arm is None:
            return None
        return Law(arm.probe_loss, arm.probe_se, self.start + arm.probe_flops, self.slope, self.slope_se)

    def _price(self, name: str) -> int:
        weighed = self._weighed(name)
        if weighed is not None:
            return weighed.price_flops
        return round(expected_price(next(arm for arm in self.arms if arm.name == name), self.plan))

    def training(self, name: str, share: float = 1.0) -> float:
        """Return the FLOPs that an arm trains with since the warm-up, where `share` of what may be spent is spent."""
        weighed = self._weighed(name)
        if self.races and self.weighing is not None and weighed is not None:
            return max(0.0, share * self.weighing.spendable_flops - weighed.price_flops) + weighed.probe_flops
        return max(0.0, share * self.limit - self._price(name))

    def _total(self, name: str, training: float) -> float:
        """Return the FLOPs of a whole run that trains an arm with so many."""
        race = self.probes - (weighed.probe_flops if (weighed := self._weighed(name)) else 0) if self.races else 0
        return self.before + race + self._price(name) + training + self.evaluation

    def flops(self, name: str, law: Law | None, share: float = 1.0) -> Span:
        """Return the FLOPs of a whole run that may spend `share` of what there is: what its policy leaves comes off."""
        most = self.training(name, share)
        left: Any = self.decision.numbers.get("rounds_left") if self.decision else self.config.govern.rounds
        rounds = max(1, int(left or 1))
        if law is None:  # one round at the least, all of it at the most
            ends = (most, most / rounds, most)
        else:
            found = law.enough(self.start + most, self.least_gain)
            # policies end a run by the upper bound of what comes
            ends = (found.high - self.start, found.low - self.start, most)
        expected, low, high = (self._total(name, training) for training in ends)
        least: Any = self.decision.numbers.get("least_segment_flops") if self.decision else None
        slack = (rounds + 1) * float(least or 0)  # less than a segment's least stays unspent, in every round
        return Span(expected=expected, low=min(expected, max(0.0, low - slack)), high=high)

    def _best(self, offers: tuple[Offer, ...]) -> str:
        """Return the arm that pays as it was weighed; where chance does, or none was, what words are surest of."""
        chance = offers[0].arm
        if self.weighing is not None and self.weighing.chosen != chance:
            return self.weighing.chosen
        worded = [name for name, found in self.likeness.items() if moves_enough(found) and not self._weighed(name)]
        return max(worded, key=lambda name: self.likeness[name].moved, default=chance)

    def stops(self, name: str, law: Law) -> tuple[float, ...]:
        """Return the shares of what may be spent at which training is quoted to end, least first."""
        return tuple(sorted({*SHARES, self.share(name, law), 1.0}))

    def _stops(self, name: str, law: Law) -> tuple[StopOffer, ...]:
        return tuple(
            StopOffer(
                share=share,
                loss=law.loss(self.start + self.training(name, share)),
                flops=self.flops(name, law, share),
            )
            for share in self.stops(name, law)
        )

    def share(self, name: str, law: Law) -> float:
        """Return the share of what may be spent after which the rest brings next to nothing, at the upper slope."""
        most = self.start + self.training(name)
        enough = law.enough(most, self.least_gain or NEXT_TO_NOTHING).high
        spendable = self.weighing.spendable_flops if self.races and self.weighing else self.limit
        saved = (most - enough) / max(1.0, spendable)
        return min(1.0, max(1e-6, 1.0 - saved))

    def _unknown(self, offers: tuple[Offer, ...]) -> list[str]:
        found = []
        if self.decision is None:
            found.append(
                "what any loss will be: nothing was trained, a warm-up and a probe would pass the quote's share"
            )
        elif self.weighing is None:
            found.append("what any loss will be: no probe fits the quote's share of the budget")
        failed = self.weighing.failed if self.weighing else ()
        for offer in offers:
            if offer.arm in failed:
                found.append(f"what {offer.arm} would reach: its probe's loss was not finite")
            elif offer.basis == "nothing" and not offer.chance:
                found.append(f"whether {offer.arm} beats chance: it was not probed, and words tell nothing of it")
            elif offer.basis == "words" and self.weighing is not None:
                found.append(f"what {offer.arm} would reach: it was not probed")
        technique = str(self.plan.technique.get("method"))
        others = sorted({str(way["technique"]) for way in self.plan.considered if way["fits"]} - {technique})
        if others and self.weighing is not None:
            found.append(f"what losses {', '.join(others)} would reach: the probes trained {technique}")
        return found


def evaluations(curve: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return (flops_P, loss_P) of the finite evaluations of a segment."""
    seen = curve.filter(pc.fill_null(pc.is_finite(curve.column("validation_loss")), False))
    return seen.column("flops").to_numpy().astype(np.float64), seen.column("validation_loss").to_numpy()
