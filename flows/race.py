"""The race: ways of choosing, each tried by a short training from one checkpoint; the one that pays goes on.

Who is raced, and who needs no race, `arms` says from prices and from the likeness of what an arm that reads text would
take. Every arm is scored, selected and trained by the stages themselves, so that what trying costs is counted, kept,
reused and shown like all else; `weigh` decides. A dear arm scores a sample of the pool first, and the whole of it only
where it wins. What was learnt in the winner's probe is kept: the run goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from data_contracts.config import ArmConfig, Config, SelectConfig, TrainConfig
from data_contracts.cost import Frozen
from data_contracts.errors import BudgetError, ConfigError, InputError, MethodError
from data_contracts.records import Decision, Likeness, Plan, Ref, Result, Weighing
from flows.arms import (
    PROBE_EVALUATIONS,
    PROBE_VISITS,
    chooses,
    contest,
    first_share,
    least_probe,
    probed_share,
    said,
    sections,
    share_of,
    spendable,
)
from flows.mixing import mixed
from flows.reading import reads_scores
from stages.governor.payback import expected_price

R = TypeVar("R", bound=Frozen)
MOST_VISITS = 40.0
"""Of a row: more repetitions teach nothing (Muennighoff et al. 2023)."""
CANNOT_WORK = (ConfigError, InputError, MethodError, BudgetError)
"""What a stage raises for an arm that cannot work here."""
NEVER_ENDS = {"method": "patience", "patience": 10**9}
"""The policy inside a probe: arms are compared at equal FLOPs."""


class Asker(Protocol):
    """Who calls stages for ways of choosing."""

    @property
    def config(self) -> Config:
        """The configuration."""

    def call_for(self, arm: str, verb: str, settings: Mapping[str, Frozen], /, **inputs: tuple[Ref, ...]) -> Result:
        """Call a stage for one way of choosing, with these sections in place of the configuration's."""

    def read(self, result: Result, output: str, kind: type[R]) -> R:
        """Read a record that a call gave."""

    def notice(self, text: str) -> None:
        """Tell the user something."""


class Caller(Asker, Protocol):
    """Who goes on from what was found: a pipeline run, or a benchmark."""

    def settle(self, settings: Mapping[str, Frozen]) -> None:
        """Let these sections stand in for those of the configuration in all calls to come."""


@dataclass(frozen=True)
class Won:
    """What the race leaves.

    Attributes:
        weighed: the call that decided.
        trained: the winner's probe, from which the run goes on.
        selection, scores, features: the winner's, of the whole pool; the latter two empty where it reads none.
        mixture: what shares its selection out to the parts of the pool; empty where the configuration asks for none.
        selections: all that was trained on or will be: the probe's and the whole pool's.
    """

    weighed: Result
    trained: Result
    selection: tuple[Ref, ...]
    scores: tuple[Ref, ...]
    features: tuple[Ref, ...]
    mixture: tuple[Ref, ...]
    selections: tuple[Ref, ...]


def race(run: Caller, *, planned: Result, decided: Result, **shared: tuple[Ref, ...]) -> Won | None:
    """Try every arm that may pay, settle on the winner's settings and return its outputs.

    Where no race is needed or none can tell, one arm is settled on untried.

    Args:
        run: who calls the stages.
        planned, decided: the plan and the decision that stand; the decision says what may be spent.
        shared: references by name: base, checkpoint, pool, target, validation, pool_tokens, target_tokens,
            validation_tokens, example_losses, validation_losses (of what led to the checkpoint); where the run has a
            retention set, retention_tokens and retention_reference.
    """
    auto, plan = run.config.auto, run.read(planned, "plan", Plan)
    decision = run.read(decided, "decision", Decision)
    limit = spendable(decision, plan)
    shared = {**shared, "plan": planned.ref("plan"), "decision": decided.ref("decision")}
    least = least_probe(decision, auto.least_steps, PROBE_EVALUATIONS)
    told = likenesses(run, auto.arms, plan, limit, shared)
    held = contest(auto.arms, plan, limit, auto, least, told)
    for name, likeness in told.items():
        run.notice(f"{name}, by words alone: {said(likeness)}")
    for name, why in held.left_out.items():
        run.notice(f"the arm {name} is not tried: {why}")
    first, *others = held.arms
    if not others:
        if len(auto.arms) > 1:
            run.notice(f"{first.name} is used untried: {held.why}")
        fraction = share_of(first, plan, limit)
        left = max(1.0, limit - expected_price(first, plan))
        run.settle({**sections(run.config, first, fraction), "train": _to_the_end(run.config, left, fraction, plan)})
        return None
    probe = int(held.probe_flops)
    tried = [tried_arm(run, first, plan, limit, probe, shared)]
    for arm in others:
        try:
            tried.append(tried_arm(run, arm, plan, limit, probe, shared))
        except CANNOT_WORK as error:
            run.notice(f"the arm {arm.name} is left out: {error.found} ({error.remedy})")
    weighed = weigh(run, tried, shared)
    weighing = run.read(weighed, "weighing", Weighing)
    winner = next(item for item in tried if item.arm.name == weighing.chosen)
    fraction = next(arm.fraction for arm in weighing.arms if arm.name == weighing.chosen)
    settings = sections(run.config, winner.arm, fraction)
    run.settle({**settings, "train": _to_the_end(run.config, weighing.spendable_flops, fraction, plan)})
    scored, mixture, selected = _choose(run, f"won-{winner.arm.name}", settings, shared)
    return Won(
        weighed,
        winner.trained,
        selected.ref("selection"),
        scored.ref("scores") if scored else (),
        scored.ref("features") if scored else (),
        mixture,
        tuple(dict.fromkeys(winner.selected.ref("selection") + selected.ref("selection"))),
    )


def weigh(run: Asker, tried: Sequence[Tried], shared: Mapping[str, tuple[Ref, ...]]) -> Result:
    """Weigh arms that were tried against each other, the first being the one to beat."""
    return run.call_for(
        "race",
        "weigh",
        {"auto": run.config.auto.model_copy(update={"arms": tuple(item.arm for item in tried)})},
        start=shared["validation_losses"],
        validation_losses=tuple(ref for item in tried for ref in item.trained.ref("validation_losses")),
        curve=tuple(ref for item in tried for ref in item.trained.ref("curve")),
        selection=tuple(ref for item in tried for ref in item.selected.ref("selection")),
        **_given(shared, "plan", "decision", "target_tokens"),
    )


def likenesses(
    run: Asker, arms: Sequence[ArmConfig], plan: Plan, limit: float, shared: Mapping[str, tuple[Ref, ...]]
) -> dict[str, Likeness]:
    """Return the likeness of what each arm takes that reads text alone, by its name; nothing is trained.

    Args:
        run: who calls the stages.
        arms: the arm to beat, then the others.
        plan, limit: how much an arm takes.
        shared: references by name, as `race` has them.
    """
    found = {}
    for arm in arms[1:]:
        if arm.passes or not chooses([arms[0], arm], plan, limit):
            continue
        settings = sections(run.config, arm, first_share(arm, plan, limit))
        try:
            *_, selected = _choose(run, f"like-{arm.name}", settings, shared, shared["validation"])
        except CANNOT_WORK as error:
            run.notice(f"whether rows that {arm.name} takes are like the target is not told: {error.found}")
            continue
        if selected.ref("likeness"):
            found[arm.name] = run.read(selected, "likeness", Likeness)
    return found


def _to_the_end(config: Config, flops: float, fraction: float, plan: Plan) -> TrainConfig:
    """Return the section `train` with as many passes as the rest of the budget has room for.

    What a segment may spend, and whether more is worth its price, the governor says.
    """
    passes = min(MOST_VISITS, flops / (plan.pass_flops * fraction))
    return config.train.model_copy(update={"epochs": max(config.train.epochs, passes)})


@dataclass(frozen=True)
class Tried:
    """An arm and what trying it gave: the selection of its probe, and the probe."""

    arm: ArmConfig
    selected: Result
    trained: Result


def tried_arm(
    run: Asker, arm: ArmConfig, plan: Plan, limit: float, probe: int, shared: Mapping[str, tuple[Ref, ...]]
) -> Tried:
    """Choose as the arm does, from a sample where it is dear, and train on it for `probe` FLOPs, whatever comes."""
    auto, config, name = run.config.auto, run.config, f"race-{arm.name}"
    share = probed_share(arm, plan, limit, probe, auto)
    settings = sections(config, arm, share, auto.sample if arm.passes else None)
    *_, selected = _choose(run, name, settings, shared)
    trained = run.call_for(
        name,
        "train",
        {
            "train": config.train.model_copy(
                update={
                    "probe": True,
                    "segment_flops": probe,
                    "epochs": 2 * PROBE_VISITS,
                    "evaluations": PROBE_EVALUATIONS,
                }
            ),
            "govern": config.govern.model_copy(update={"policy": NEVER_ENDS}),
        },
        tokens=shared["pool_tokens"] + shared["target_tokens"],
        selection=selected.ref("selection"),
        **_given(shared, "base", "plan", "validation_tokens", "target_tokens", "checkpoint", "decision"),
        **_given(shared, "retention_tokens", "retention_reference"),
    )
    return Tried(arm, selected, trained)


def _choose(
    run: Asker,
    name: str,
    settings: Mapping[str, Frozen],
    shared: Mapping[str, tuple[Ref, ...]],
    validation: tuple[Ref, ...] = (),
) -> tuple[Result | None, tuple[Ref, ...], Result]:
    """Score where the selector reads scores, mix where the configuration asks for it, and select.

    With the examples of `validation` the selection says how like them it is.
    """
    select, scored = settings["select"], None
    assert isinstance(select, SelectConfig)
    if reads_scores(select):
        scored = run.call_for(
            name,
            "score",
            settings,
            **_given(
                shared, "base", "plan", "checkpoint", "pool_tokens", "target_tokens", "pool", "target", "example_losses"
            ),
        )
    found = {part: scored.ref(part) if scored else () for part in ("scores", "features")}
    inputs = _given(shared, "pool_tokens", "target_tokens", "plan", "pool", "target", "example_losses") | found
    more = _given(shared, "base", "checkpoint")
    mixture = mixed(run.config, lambda verb, **refs: run.call_for(name, verb, settings, **refs), **inputs, **more)
    selected = run.call_for(name, "select", settings, mixture=mixture, validation=validation, **inputs)
    return scored, mixture, selected


def _given(shared: Mapping[str, tuple[Ref, ...]], *names: str) -> dict[str, tuple[Ref, ...]]:
    return {name: shared.get(name, ()) for name in names}
