"""The race: ways of choosing, each tried by a short training from one checkpoint; the one that pays goes on.

Every arm is scored, selected and trained by the stages themselves, so that what trying costs is counted, kept, reused
and shown like all else; `weigh` decides. A dear arm scores a sample of the pool first, and the whole of it only where
it wins. An arm whose choosing would take too much of what may be spent is not tried. What was learnt in the winner's
probe is kept: the run goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from data_contracts.config import ArmConfig, AutoConfig, Config, ScoreConfig, SelectConfig, TrainConfig
from data_contracts.cost import Frozen
from data_contracts.errors import BudgetError, ConfigError, InputError, MethodError
from data_contracts.records import Decision, Plan, Ref, Result, Weighing
from flows.mixing import mixed
from stages.governor.payback import budget_fraction

R = TypeVar("R", bound=Frozen)
MOST_VISITS = 40.0
"""Of a row: more repetitions teach nothing (Muennighoff et al. 2023)."""
MOST_OF_THE_POOL = 0.9
"""An arm that takes more of the pool does not choose."""
PROBE_VISITS = 2.0
"""Of a row in a probe at the most: beyond, what is compared is over-fitting to a sample."""
NEVER_ENDS = {"method": "patience", "patience": 10**9}
"""The policy inside a probe: arms are compared at equal FLOPs."""


class Caller(Protocol):
    """Who calls stages: a pipeline run, or a benchmark."""

    @property
    def config(self) -> Config:
        """The configuration."""

    def call_for(self, arm: str, verb: str, settings: Mapping[str, Frozen], /, **inputs: tuple[Ref, ...]) -> Result:
        """Call a stage for one way of choosing, with these sections in place of the configuration's."""

    def read(self, result: Result, output: str, kind: type[R]) -> R:
        """Read a record that a call gave."""

    def notice(self, text: str) -> None:
        """Tell the user something."""

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

    Where no other arm would choose or may pay, or a probe would tell nothing, the first arm is settled on untried.

    Args:
        run: who calls the stages.
        planned, decided: the plan and the decision that stand; the decision says what may be spent.
        shared: references by name: base, checkpoint, pool, target, pool_tokens, target_tokens, validation_tokens,
            example_losses.
    """
    auto, plan = run.config.auto, run.read(planned, "plan", Plan)
    decision = run.read(decided, "decision", Decision)
    limit = spendable(decision, plan)
    shared = {**shared, "plan": planned.ref("plan"), "decision": decided.ref("decision")}
    least = least_probe(decision, auto.least_steps, run.config.train.evaluations)
    first, *others = arms = contenders(auto.arms, plan, limit, auto, least)
    probe = probe_flops(len(arms), limit, auto, least)
    for arm in auto.arms[1:]:
        if arm not in arms:
            run.notice(f"the arm {arm.name} is not tried: {left_out(arm, plan, limit, auto, least)}")
    if not chooses(arms, plan, limit) or not probe:
        if len(auto.arms) > 1:
            run.notice(f"{first.name} is used untried: {_untold(arms, plan, limit, auto, least)}")
        fraction = share_of(first, plan, limit)
        left = max(1.0, limit - expected_price(first, plan))
        run.settle({**sections(run.config, first, fraction), "train": _to_the_end(run.config, left, fraction, plan)})
        return None
    tried = [_try(run, first, plan, limit, int(probe), shared)]
    for arm in others:
        try:
            tried.append(_try(run, arm, plan, limit, int(probe), shared))
        except (ConfigError, InputError, MethodError, BudgetError) as error:
            run.notice(f"the arm {arm.name} is left out: {error.found} ({error.remedy})")
    weighed = run.call_for(
        "race",
        "weigh",
        {"auto": auto.model_copy(update={"arms": tuple(item.arm for item in tried)})},
        start=shared["checkpoint"],
        checkpoint=tuple(ref for item in tried for ref in item.trained.ref("checkpoint")),
        curve=tuple(ref for item in tried for ref in item.trained.ref("curve")),
        selection=tuple(ref for item in tried for ref in item.selected.ref("selection")),
        **_given(shared, "base", "plan", "decision", "target_tokens", "validation_tokens"),
    )
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


def _untold(arms: Sequence[ArmConfig], plan: Plan, limit: float, auto: AutoConfig, least: float) -> str:
    """Return why there is no race between `arms`, the first and those that were not left out."""
    if len(arms) == 1:
        return "no other arm is left"
    if not chooses(arms, plan, limit):
        return "no other arm would leave a tenth of the pool out"
    return (
        f"{len(arms)} probes of {auto.least_steps} step(s) take {len(arms) * least:.3g} FLOPs with their evaluations, "
        f"more than {auto.most_probes:.0%} of the {limit:.3g} that may be spent"
    )


def _to_the_end(config: Config, flops: float, fraction: float, plan: Plan) -> TrainConfig:
    """Return the section `train` with as many passes as the rest of the budget has room for.

    What a segment may spend, and whether more is worth its price, the governor says.
    """
    passes = min(MOST_VISITS, flops / (plan.pass_flops * fraction))
    return config.train.model_copy(update={"epochs": max(config.train.epochs, passes)})


def spendable(decision: Decision, plan: Plan) -> float:
    """Return the FLOPs that choosing and training may spend; without a limit, those of one pass over the pool."""
    limit = decision.numbers.get("spendable_flops")
    return float(plan.pass_flops if limit is None else limit)


def least_probe(decision: Decision, steps: int, evaluations: int) -> float:
    """Return the FLOPs of the shortest probe that tells something: its steps, and the evaluations that read them."""
    step, dearest = (float(decision.numbers[name] or 0) for name in ("step_flops", "least_segment_flops"))
    return steps * step + min(steps, evaluations) * max(0.0, dearest / 2 - step)


def probe_flops(arms: int, limit: float, auto: AutoConfig, least: float) -> float:
    """Return what each probe may spend: its share, or `least` where that is longer; 0 where all would take too much."""
    if least <= auto.probe_share * limit:
        return auto.probe_share * limit
    return least if arms * least <= auto.most_probes * limit else 0.0


def expected_price(arm: ArmConfig, plan: Plan) -> float:
    """Return the FLOPs that choosing this way from the whole pool is expected to cost, before it was tried.

    `arm.passes` trainings on each row that its filters let through.
    """
    share = arm.passes
    for settings in arm.coverage.get("filters", ()):
        share *= float(settings.get("keep", 1.0))
    return share * plan.pass_flops


def share_of(arm: ArmConfig, plan: Plan, limit: float) -> float:
    """Return the share of the pool that an arm takes where `limit` FLOPs may be spent."""
    left = max(1.0, limit - expected_price(arm, plan))
    return arm.fraction or budget_fraction(left, plan.pass_flops, arm.epochs)


def chooses(arms: Sequence[ArmConfig], plan: Plan, limit: float) -> bool:
    """Return whether an arm beside the first would leave a tenth of the pool out, or more."""
    return any(share_of(arm, plan, limit) <= MOST_OF_THE_POOL for arm in arms[1:])


def contenders(
    arms: Sequence[ArmConfig], plan: Plan, limit: float, auto: AutoConfig, least: float = 0.0
) -> list[ArmConfig]:
    """Return the first arm and those beside it that are not left out."""
    return [arms[0], *(arm for arm in arms[1:] if not left_out(arm, plan, limit, auto, least))]


def left_out(arm: ArmConfig, plan: Plan, limit: float, auto: AutoConfig, least: float = 0.0) -> str:
    """Return why an arm beside the first is not tried where `limit` FLOPs may be spent; "" where it is.

    `least` are the FLOPs of the shortest probe that tells something, where that is known.
    """
    if expected_price(arm, plan) > auto.most_price * limit:
        return f"its price is above {auto.most_price:.0%}"
    one_pass = plan.pass_flops * share_of(arm, plan, limit) * (auto.sample if arm.passes else 1.0)
    if max(auto.probe_share * limit, least) > PROBE_VISITS * one_pass:
        return f"its probe would visit a row more than {PROBE_VISITS:g} times"
    return ""


@dataclass(frozen=True)
class _Tried:
    arm: ArmConfig
    selected: Result
    trained: Result


def _try(
    run: Caller, arm: ArmConfig, plan: Plan, limit: float, probe: int, shared: Mapping[str, tuple[Ref, ...]]
) -> _Tried:
    """Choose as the arm does, from a sample where it is dear, and train on it for `probe` FLOPs, whatever comes."""
    auto, config, name = run.config.auto, run.config, f"race-{arm.name}"
    part = auto.sample if arm.passes else 1.0
    settings = sections(config, arm, share_of(arm, plan, limit) * part, auto.sample if arm.passes else None)
    *_, selected = _choose(run, name, settings, shared)
    trained = run.call_for(
        name,
        "train",
        {
            "train": config.train.model_copy(update={"segment_flops": probe, "epochs": 2 * PROBE_VISITS}),
            "govern": config.govern.model_copy(update={"policy": NEVER_ENDS}),
        },
        tokens=shared["pool_tokens"] + shared["target_tokens"],
        selection=selected.ref("selection"),
        **_given(shared, "base", "plan", "validation_tokens", "target_tokens", "checkpoint", "decision"),
    )
    return _Tried(arm, selected, trained)


def _choose(
    run: Caller, name: str, settings: Mapping[str, Frozen], shared: Mapping[str, tuple[Ref, ...]]
) -> tuple[Result | None, tuple[Ref, ...], Result]:
    """Score where the selector reads scores, mix where the configuration asks for it, and select."""
    select, scored = settings["select"], None
    assert isinstance(select, SelectConfig)
    if select.selector.get("method") != "random":
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
    selected = run.call_for(name, "select", settings, mixture=mixture, **inputs)
    return scored, mixture, selected


def _given(shared: Mapping[str, tuple[Ref, ...]], *names: str) -> dict[str, tuple[Ref, ...]]:
    return {name: shared[name] for name in names}


def sections(config: Config, arm: ArmConfig, fraction: float, sample: float | None = None) -> dict[str, Frozen]:
    """Return the sections `score` and `select` of an arm that takes `fraction` of the pool.

    Args:
        config: what the arm does not set stays as it is there.
        arm: the way of choosing.
        fraction: of the pool's rows.
        sample: share of the pool that is scored, drawn by chance behind the arm's own filters; None: all.
    """
    coverage = arm.coverage
    if sample is not None:
        filters = list(coverage.get("filters", ())) if coverage.get("method") == "cascade" else []
        coverage = {"method": "cascade", "filters": [*filters, {"method": "random", "keep": sample}]}
    score = ScoreConfig(**{**config.score.model_dump(), "scorer": arm.scorer, "coverage": coverage})
    kept = {name: getattr(config.select, name) for name in ("include_target", "noise", "mixture", "repetition")}
    return {"score": score, "select": SelectConfig(selector=arm.selector, fraction=min(1.0, fraction), **kept)}
