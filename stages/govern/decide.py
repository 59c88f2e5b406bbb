"""From curves, checkpoints, ledger and the previous decision to the next one. Pure.

What may still be spent is the budget minus the ledger, minus a share kept for the final evaluation; limits in tokens,
seconds or money are turned into FLOPs at the rate at which training has spent them so far, so that one number is
compared, and the one that binds is named. Each remaining round gets an equal share, and there are no more rounds than
affordable ones. Before the first scoring its cost is taken to be that of one training pass over the pool, as planned.
A policy that has seen enough closes: the last segment is a decay alone, `train.decay_share` of what was trained.
A new plan is offered where it is owed or pays (`stages/governor/reallocation.py`); whatever is done next is then done
under it. No two follow each other for what it is worth alone: a cool-down of one decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median_low
from typing import Protocol

import pyarrow as pa

from data_contracts.config import BudgetConfig, GovernConfig, TrainConfig
from data_contracts.cost import STOCKS, Budget, Cost, Stock
from data_contracts.direction import direction_of
from data_contracts.errors import ArtifactError
from data_contracts.ledger import Ledger
from data_contracts.method import resolve
from data_contracts.records import Decision, MemoryUse, Plan, Ref, Weighing
from stages.governor.policy import BETWEEN, Choice, Number, Policy, evidence, forgetting
from stages.governor.reallocation import Reallocation, changed, other_batch, ran_out
from stages.governor.state import Drift, Point, State

CHOOSING = ("score", "select", "mix")
"""Stages that choose."""


class Settings(Protocol):
    """The sections of the configuration that a decision reads."""

    @property
    def budget(self) -> BudgetConfig: ...
    @property
    def govern(self) -> GovernConfig: ...
    @property
    def train(self) -> TrainConfig: ...


def decide(
    settings: Settings,
    curves: Sequence[pa.Table],
    checkpoints: Sequence[Ref],
    plan: Plan,
    previous: Decision | None,
    spent: Ledger,
    *,
    drift: Drift | None = None,
    use: MemoryUse | None = None,
    weighing: Weighing | None = None,
    remixes: bool = False,
) -> tuple[Decision, State]:
    """Return the decision after the latest of `curves`, and the state that it was made from.

    Args:
        settings: the sections `budget`, `govern` and `train`.
        curves, checkpoints: one a segment, the warm-up first.
        plan: says what one training pass over the pool costs.
        previous: the decision that led to the latest segment; None after the warm-up.
        spent: everything that the inputs descend from; money is charged at the budget's price.
        drift: what has moved under the latest selection; None where nothing tells.
        use: what the latest segment held; None where nothing tells.
        weighing: of the ways of choosing that were tried before the latest segment.
        remixes: whether a mixture is in force that follows training.

    Raises `ArtifactError` where curves and checkpoints are not parallel or do not follow `previous`.
    """
    round_ = 0 if previous is None else previous.round + 1
    if not curves or len(curves) != len(checkpoints) or len(curves) != round_ + 1:
        raise ArtifactError(
            "one curve and one checkpoint a segment, oldest first, and one segment a decision",
            f"{len(curves)} curve(s) and {len(checkpoints)} checkpoint(s) after round {round_}",
            "pass the outputs of begin and of every train so far, with the latest decision",
        )
    govern = settings.govern
    direction = direction_of(govern.metric, govern.direction)
    actions = _actions(previous)
    budget, spent = settings.budget.limits, spent.priced(settings.budget.price)
    remaining = budget.minus(spent.total)
    spendable, binding = _spendable(budget, remaining, spent, govern.evaluation_share)
    rounds_left = max(0, govern.rounds - round_)
    seen = State.from_curves(
        curves, metric=govern.metric, direction=direction, actions=actions, most_forgotten=govern.most_forgotten_nats
    )
    steps = _step_flops(seen)
    least = max(1, 2 * steps[-1])  # less than two of the dearest, evaluation included, is no segment
    if spendable is not None:
        rounds_left = min(rounds_left, spendable // least)
    tried = _tried(spent, previous, weighing)
    choosing, mixing = _mean_choosing(spent, actions, tried)
    share = None if spendable is None else spendable // max(1, rounds_left)
    whole = seen.segment_flops(seen.last_segment)
    horizon = whole if share is None else min(whole, share)
    anew = _new_plan(settings, plan, curves, use, previous, horizon, spent)
    state = replace(seen, horizon=horizon, reselect_flops=choosing, remix_flops=mixing, reallocation=anew, drift=drift)
    open_ = BETWEEN | ({"reallocate"} if anew else set()) | ({"remix"} if remixes and mixing is not None else set())
    for action, cost in (("reselect", choosing), ("remix", mixing)):
        if cost is not None and spendable is not None and 2 * cost > spendable:
            open_ -= {action}  # choosing anew would take more than half of what is left: what was chosen stands
    choice, closes = _choose(
        govern, state, remaining.model_copy(update={"flops": spendable}), round_, rounds_left, open_
    )
    numbers: dict[str, Number] = {
        **choice.numbers,
        "spent_flops": spent.total.flops,
        "spendable_flops": spendable,
        "binding": binding,
        "rounds": govern.rounds,
        "rounds_left": rounds_left,
        "least_segment_flops": least,
        "step_flops": median_low(steps),
        **({"tried_flops": tried} if tried else {}),
        **{f"segment_{i}_action": action for i, action in enumerate(actions)},
        **{f"segment_{i}_reason": reason for i, reason in enumerate(_reasons(previous), start=1)},
    }
    if choice.action in ("reselect", "remix") and spendable is not None:
        known = choosing if choice.action == "reselect" else mixing
        expected = plan.pass_flops if known is None else known
        numbers["choosing_expected_flops"] = expected
        share = max(least, (spendable - min(expected, spendable // 2)) // rounds_left)
    if closes:
        decay = max(least, int(settings.train.decay_share * state.flops))
        share = decay if share is None else min(share, decay)
    under = anew.reason if anew is not None and _under(anew, choice) and choice.action != "stop" else None
    best = _best(state)
    numbers |= {"best_step": best.step if best else None, "best_loss": state.shown(best.loss) if best else None}
    decision = Decision(
        action=choice.action,
        reason=f"{choice.reason}; under a new plan: {under}" if under else choice.reason,
        round=round_,
        replans=under is not None or (round_ == 0 and choice.action != "stop"),
        closes=closes,
        best=checkpoints[best.segment].digest if best else None,
        best_step=best.step if best else None,
        best_loss=state.shown(best.loss) if best else None,
        non_finite_steps=state.non_finite_steps,
        direction=direction,
        segment_flops=None if choice.action == "stop" else share,
        remaining=remaining,
        numbers=numbers,
    )
    return decision, state


def _choose(
    govern: GovernConfig, state: State, remaining: Budget, round_: int, rounds_left: int, open_: frozenset[str]
) -> tuple[Choice, bool]:
    """Ask the policy for one of the actions `open_`, or of those that the number of rounds leaves.

    Returns its choice, and whether that closes: it has seen enough of these data, whatever rounds are left.
    """
    forgot = forgetting(state, open_)
    if forgot:
        return forgot, False
    policy = resolve(Policy, govern.policy, "govern.policy")
    if rounds_left == 0:
        used = round_ >= govern.rounds
        short = "the budget is used up: less is left than a step and its evaluation cost"
        reason = f"all {govern.rounds} round(s) are used" if used else short
        return Choice(action="stop", reason=reason, numbers=evidence(state)), False
    if rounds_left > 1 or round_ == 0:
        choice = policy.decide(state, remaining, open_)
        if choice.action == "continue" and state.reallocation and state.reallocation.owed:
            choice = choice.model_copy(update={"action": "reallocate"})
        return choice, choice.action == "anneal"
    choice = policy.decide(state, remaining, frozenset({"anneal", "stop"}))
    goes_on = policy.decide(state, remaining, frozenset({"continue", "anneal", "stop"})).action == "continue"
    told = choice.model_copy(update={"reason": f"the last round that fits: {choice.reason}"})
    return told, choice.action == "anneal" and not goes_on


def _best(state: State) -> Point | None:
    """Return the evaluation whose checkpoint is the best so far; None where all have forgotten more than is allowed.

    Where that is limited, the evaluation before the first step is none: it cannot forget, and leaves no checkpoint.
    """
    limited = state.retention is not None and state.retention.allowed is not None
    return replace(state, points=state.points[1:]).best if limited else state.best


def _step_flops(state: State) -> list[int]:
    """Return the FLOPs of the last segment's steps, cheapest first, those that were evaluated with their evaluation."""
    points = state.points
    steps = [
        after.flops - before.flops
        for before, after in pairwise(points)
        if before.segment == after.segment == state.last_segment
    ]
    return sorted(steps) or [state.segment_flops(state.last_segment)]


def _actions(previous: Decision | None) -> tuple[str, ...]:
    """Return the action that led to each segment, as the chain of decisions has carried it."""
    if previous is None:
        return ("warmup",)
    return (*(str(previous.numbers[f"segment_{i}_action"]) for i in range(previous.round + 1)), previous.action)


def _reasons(previous: Decision | None) -> tuple[str, ...]:
    """Return why each segment after the warm-up was made, carried along like the actions."""
    if previous is None:
        return ()
    return (
        *(str(previous.numbers.get(f"segment_{i}_reason", "")) for i in range(1, previous.round + 1)),
        previous.reason,
    )


def _spendable(
    budget: Budget, remaining: Budget, spent: Ledger, evaluation_share: float
) -> tuple[int | None, Stock | None]:
    """Return the FLOPs that training, scoring and selecting may still spend, and which stock binds; None without limit.

    A limit on another stock counts as remaining / spent-in-training × FLOPs-in-training.
    """
    trained = spent.training()
    limits: list[tuple[int, Stock]] = []
    for stock in STOCKS:
        limit: float | None = getattr(budget, stock)
        used: float = getattr(trained, stock)
        if limit is None:
            continue
        left = max(0.0, getattr(remaining, stock) - evaluation_share * limit)
        if stock == "flops":
            limits.append((int(left), stock))
        elif used > 0 and trained.flops > 0:
            worth = left / used * trained.flops
            if math.isfinite(worth):  # a limit beyond all numbers is none
                limits.append((int(worth), stock))
    return min(limits, default=(None, None))


def _tried(spent: Ledger, previous: Decision | None, weighing: Weighing | None) -> int:
    """Return FLOPs of scoring and selecting for ways of choosing that were tried and not taken, as decisions carry it.

    What is paid for trying is no price of the next choice: that is what the weighing says of the way taken.
    """
    if weighing is None:
        return 0 if previous is None else int(previous.numbers.get("tried_flops") or 0)
    price = next((arm.price_flops for arm in weighing.arms if arm.name == weighing.chosen), 0)
    return max(0, sum(spent.by_stage().get(stage, Cost()).flops for stage in CHOOSING) - price)


def _mean_choosing(spent: Ledger, actions: Sequence[str], tried: int) -> tuple[int | None, int | None]:
    """Return what a re-selection (scoring, mixing, selecting) and a remix have cost, FLOPs; None before the first.

    By stage: what training charges as scoring (a batch selector, influence in training) is no part of it.
    """
    reselected = sum(action == "reselect" for action in actions)
    if not reselected:
        return None, None
    score, select, mix = (spent.by_stage().get(stage, Cost()).flops for stage in CHOOSING)
    mixed = (select + mix) // (reselected + sum(action == "remix" for action in actions))
    return max(0, score - tried) // reselected + mixed, mixed


def _new_plan(
    settings: Settings,
    plan: Plan,
    curves: Sequence[pa.Table],
    use: MemoryUse | None,
    previous: Decision | None,
    horizon: float,
    spent: Ledger,
) -> Reallocation | None:
    """Return the new plan that is owed or pays, else None; after the warm-up one is made anyway."""
    if previous is None:
        return None
    owed = changed(plan, workers=settings.train.workers, limit=settings.budget.peak_bytes)
    if owed is not None:
        return owed
    if previous.round > 0 and previous.replans:  # the cool-down
        return None
    found = ran_out(use) or other_batch(plan, curves)
    price = spent.by_stage().get("plan", Cost()).flops
    return found if found is not None and found.pays(horizon, price, settings.govern.hysteresis) else None


def _under(anew: Reallocation, choice: Choice) -> bool:
    """Return whether what was chosen is done under a new plan: a rule may go on with the old one where none is owed."""
    return anew.owed or choice.action != "continue"
