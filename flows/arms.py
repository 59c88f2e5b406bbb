"""Arms: what each way of choosing would cost and take, and which of them are worth trying; pure numbers.

Words tell for nothing whether an arm that reads text takes rows of the target's kind: where it surely does, it is used;
where it surely does not, it is left out. So is an arm whose choosing would take too much of what may be spent, or whose
probe would tell nothing. Between those left a race decides (`race`), and where there is no room for one what is
likelier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_contracts.config import ArmConfig, AutoConfig, Config, ScoreConfig, SelectConfig
from data_contracts.cost import Frozen
from data_contracts.records import Decision, Likeness, Plan
from stages.governor.payback import (
    WORTH_MOVING,
    expected_price,
    has_core,
    kind_of,
    moves_enough,
    visited_share,
)

MOST_OF_THE_POOL = 0.9
"""An arm that takes more of the pool does not choose."""
LEAST_KIND = 0.01
"""Of the pool: a core of fewer rows is not taken, whatever words tell."""
PROBE_VISITS = 2.0
"""Of a row in a probe at the most: beyond, what is compared is over-fitting to a sample."""
PROBE_EVALUATIONS = 2
"""Of a probe: its end, by which arms are compared, and its middle, which with the ends of all tells the slope."""


@dataclass(frozen=True)
class Contest:
    """Who is raced, or who is used without a race, and why the others are not.

    Attributes:
        arms: to be raced, the arm to beat first; a single one is used untried.
        probe_flops: what each probe may spend; 0 without a race.
        why: why the single arm is used untried; "" for a race.
        left_out: why an arm is not tried, by its name.
    """

    arms: tuple[ArmConfig, ...]
    probe_flops: float
    why: str
    left_out: Mapping[str, str]


def contest(
    arms: Sequence[ArmConfig],
    plan: Plan,
    limit: float,
    auto: AutoConfig,
    least: float,
    told: Mapping[str, Likeness],
) -> Contest:
    """Return who is raced where `limit` FLOPs may be spent.

    Args:
        arms: the arm to beat, then the others.
        plan: prices a pass over the pool.
        limit: FLOPs that choosing and training may spend.
        auto: the limits of trying.
        least: FLOPs of the shortest probe that tells something.
        told: the likeness of what an arm takes, by its name, where words tell it. Such an arm takes as many rows as the
            pool has of the kind.
    """
    first, *others = arms
    others = [of_the_kind(arm, told.get(arm.name)) for arm in others]
    out = {arm.name: why for arm in others if (why := left_out(arm, plan, limit, auto, least, told.get(arm.name)))}
    standing = [first, *(arm for arm in others if arm.name not in out)]
    probe = probe_flops(standing, plan, limit, auto, least)
    if not probe and chooses(standing, plan, limit) and any(arm.passes for arm in standing):
        out |= {arm.name: f"trying would take more than {auto.most_probes:.0%}" for arm in standing if arm.passes}
        standing = [arm for arm in standing if not arm.passes]
        probe = probe_flops(standing, plan, limit, auto, least)
    sure = [arm for arm in others if moves_enough(told.get(arm.name)) and chooses([first, arm], plan, limit)]
    if sure and not (probe and any(arm.passes for arm in standing)):
        best = max(sure, key=lambda arm: told[arm.name].moved)
        out.pop(best.name, None)
        return Contest((best,), 0.0, "the rows it takes are surely of the target's kind", out)
    likely = [arm for arm in others if _likely(told.get(arm.name)) and chooses([first, arm], plan, limit)]
    if likely and not probe:
        best = max(likely, key=lambda arm: told[arm.name].moved)
        return Contest((best,), 0.0, "the rows it takes are likely of the target's kind, and nothing can be tried", out)
    if not probe:
        return Contest((first,), 0.0, _untold(standing, plan, limit, auto, least), out)
    return Contest(tuple(standing), probe, "", out)


def _likely(likeness: Likeness | None) -> bool:
    """Return whether a choice is more likely than not to move enough."""
    return likeness is not None and likeness.moved > WORTH_MOVING


def of_the_kind(arm: ArmConfig, likeness: Likeness | None) -> ArmConfig:
    """Return the arm with what share of the pool is of its kind, where words tell that and nothing is set."""
    if likeness is None or arm.fraction or arm.kind:
        return arm
    return arm.model_copy(update={"kind": max(LEAST_KIND, likeness.pool)})


def said(likeness: Likeness) -> str:
    """Return what words tell of an arm's rows."""
    return (
        f"{likeness.chosen:.0%} of the rows it takes are of the target's kind, of the pool's {likeness.pool:.0%}: "
        f"{likeness.moved:+.0%} [{likeness.low:+.0%}, {likeness.high:+.0%}]"
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


def spendable(decision: Decision, plan: Plan) -> float:
    """Return the FLOPs that choosing and training may spend; without a limit, those of one pass over the pool."""
    limit = decision.numbers.get("spendable_flops")
    return float(plan.pass_flops if limit is None else limit)


def least_probe(decision: Decision, steps: int, evaluations: int) -> float:
    """Return the FLOPs of the shortest probe that tells something: its steps, and the evaluations that read them."""
    step, dearest = (float(decision.numbers[name] or 0) for name in ("step_flops", "least_segment_flops"))
    return steps * step + min(steps, evaluations) * max(0.0, dearest / 2 - step)


def probe_flops(arms: Sequence[ArmConfig], plan: Plan, limit: float, auto: AutoConfig, least: float) -> float:
    """Return what each probe may spend; 0 where there is nothing to race for.

    `probe_share`, or less where all together, with what dear arms score for them, would take more than `most_probes`;
    where no probe of `least` fits there is no race.
    """
    if not chooses(arms, plan, limit):
        return 0.0
    fits = (auto.most_probes * limit - sum(auto.sample * expected_price(arm, plan) for arm in arms)) / len(arms)
    probe = max(least, min(auto.probe_share * limit, fits))
    return probe if probe <= fits else 0.0


def share_of(arm: ArmConfig, plan: Plan, limit: float) -> float:
    """Return how many visits a pass over an arm's choice makes where `limit` FLOPs may be spent, of the pool's rows."""
    return visited_share(arm, _left(arm, plan, limit), plan.pass_flops)


def first_share(arm: ArmConfig, plan: Plan, limit: float) -> float:
    """Return the share of the pool that an arm is judged by: its choice, or the core of it."""
    share = share_of(arm, plan, limit)
    return kind_of(arm) if not arm.fraction and has_core(share, arm.epochs, kind_of(arm)) else share


def probed_share(arm: ArmConfig, plan: Plan, limit: float, probe: float, auto: AutoConfig) -> float:
    """Return the share of the pool that an arm's probe of `probe` FLOPs trains on.

    What the arm is judged by, or more of its choice where the probe would visit that too often; of a dear arm the
    `auto.sample` of it.
    """
    part = auto.sample if arm.passes else 1.0
    first, most = first_share(arm, plan, limit), share_of(arm, plan, limit)
    if first < most:
        most = min(most, arm.epochs * first)
    return part * min(most, max(first, probe / (PROBE_VISITS * plan.pass_flops * part)))


def _left(arm: ArmConfig, plan: Plan, limit: float) -> float:
    return max(1.0, limit - expected_price(arm, plan))


def chooses(arms: Sequence[ArmConfig], plan: Plan, limit: float) -> bool:
    """Return whether an arm beside the first would not visit nine tenths of the pool `epochs` times."""
    shares = (arm.fraction or _left(arm, plan, limit) / plan.pass_flops / arm.epochs for arm in arms[1:])
    return any(share <= MOST_OF_THE_POOL for share in shares)


def left_out(
    arm: ArmConfig,
    plan: Plan,
    limit: float,
    auto: AutoConfig,
    least: float = 0.0,
    likeness: Likeness | None = None,
) -> str:
    """Return why an arm beside the first is not tried where `limit` FLOPs may be spent; "" where it is.

    `least` are the FLOPs of the shortest probe that tells something, `likeness` is what words tell; where known.
    """
    if moves_enough(likeness) is False:
        return "too few of the rows it takes are of the target's kind"
    if expected_price(arm, plan) > auto.most_price * limit:
        return f"its price is above {auto.most_price:.0%}"
    probe = max(auto.probe_share * limit, least)
    if probe > PROBE_VISITS * plan.pass_flops * probed_share(arm, plan, limit, probe, auto):
        return f"its probe would visit a row more than {PROBE_VISITS:g} times"
    return ""


def sections(config: Config, arm: ArmConfig, fraction: float, sample: float | None = None) -> dict[str, Frozen]:
    """Return the sections `score` and `select` of an arm that takes `fraction` of the pool.

    Args:
        config: what the arm does not set stays as it is there.
        arm: the way of choosing.
        fraction: visits a pass over the choice makes, of the pool's rows; beyond `epochs` times the arm's `kind` that
            is a core, and further rows are visited once. A repetition that the configuration asks for stands instead.
        sample: share of the pool that is scored, drawn by chance behind the arm's own filters; None: all.
    """
    coverage = arm.coverage
    if sample is not None:
        filters = list(coverage.get("filters", ())) if coverage.get("method") == "cascade" else []
        coverage = {"method": "cascade", "filters": [*filters, {"method": "random", "keep": sample}]}
    score = ScoreConfig(**{**config.score.model_dump(), "scorer": arm.scorer, "coverage": coverage})
    kept = {name: getattr(config.select, name) for name in ("include_target", "noise", "mixture", "repetition")}
    if not kept["repetition"] and not arm.fraction and has_core(fraction, arm.epochs, kind_of(arm)):
        kept["repetition"] = {"method": "core", "share": kind_of(arm), "visits": arm.epochs}
    return {"score": score, "select": SelectConfig(selector=arm.selector, fraction=min(1.0, fraction), **kept)}
