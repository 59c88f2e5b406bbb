"""The quote of a run: the run's own first calls, as many of its race's probes as a small share of the budget pays, and
what the stage `quote` makes of them.

Calls are those that a run makes, so that it adopts them: where `auto` races, the probes of the quote are the race's.
Arms are tried as a run would try them, chance first and the cheapest next, each only where all that trying took so far
leaves room for it. Where not even chance can be tried nothing is trained, and the plan and words alone tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.config import ARMS, ArmConfig, AutoConfig, Config
from data_contracts.cost import Frozen
from data_contracts.errors import ConfigError
from data_contracts.method import find, name_in
from data_contracts.records import Decision, Likeness, Plan, Ref, Result, Weighing
from flows.arms import (
    PROBE_EVALUATIONS,
    contest,
    least_probe,
    left_out,
    of_the_kind,
    sections,
    share_of,
    spendable,
)
from flows.lineage import start_of
from flows.loop import planned_anew
from flows.pipeline import first_decision, first_plan, warmed_up
from flows.pipeline_run import PipelineRun
from flows.race import CANNOT_WORK, Tried, likenesses, tried_arm, weigh
from stages.governor.payback import expected_price
from stages.governor.quoting import modelled_limit
from stages.score.scorer import Scorer

SHARE = 0.05
"""Of what may be spent: the most that probes may cost, choosing for them included."""
SLACK = 1.25
"""On what scoring a sample and an evaluation are expected to cost, before it was done."""
CONFIGURED = "configured"
"""What the way of choosing is called that `score` and `select` describe, where `auto` names none."""


def quote(run: PipelineRun) -> Result:
    """Make the calls of a quote and return the stage's result."""
    config, data = run.config, run.call("ingest")
    arms = ways(config, data.refs["pool_tokens"].rows)
    planned = first_plan(run, data)
    plan = run.read(planned, "plan", Plan)
    shared = {name: data.ref(name) for name in ("base", "pool", "target", "validation")}
    shared |= {f"{split}_tokens": data.ref(f"{split}_tokens") for split in ("pool", "target", "validation")}
    shared |= {"retention_tokens": data.ref("retention_tokens")}
    read = sum(_tokens(run, data, name) for name in ("validation_tokens", "retention_tokens") if name in data.refs)
    reading = SLACK * plan.flops_per_token_forward * read
    target = plan.flops_per_token * _tokens(run, data, "target_tokens")
    limit = modelled_limit(config.budget.limits, config.budget.price, plan, config.govern.evaluation_share)
    made: dict[str, tuple[Ref, ...]] = {}
    if not _room_for_one(config.auto, config, plan, data.refs["pool_tokens"].rows, limit, reading):
        given = {**shared, "plan": planned.ref("plan")}
        quoted = Quoted(run, arms, plan, limit, likenesses(run, arms, plan, limit, given))
    else:
        start = start_of(run, data, planned)
        begun = warmed_up(run, data, planned.ref("plan"), start)
        checkpoint, curves = begun.ref("checkpoint"), begun.ref("curve")
        decided = first_decision(run, data, planned.ref("plan"), begun, start)
        decision = run.read(decided, "decision", Decision)
        if not decision.stops:
            run.next_round()
            planned = planned_anew(run, data, checkpoint, curves)
            plan = run.read(planned, "plan", Plan)
        shared |= {"checkpoint": checkpoint}
        shared |= {name: begun.ref(name) for name in ("example_losses", "validation_losses")}
        shared |= {"retention_reference": begun.ref("retention_losses")}
        given = {**shared, "plan": planned.ref("plan"), "decision": decided.ref("decision")}
        limit = spendable(decision, plan)
        least = least_probe(decision, config.auto.least_steps, PROBE_EVALUATIONS)
        told = likenesses(run, arms, plan, limit, given)
        quoted = Quoted(run, arms, plan, limit, told, least)
        tried = [] if decision.stops else _probes(run, quoted, given, target)
        made = {"decision": decided.ref("decision")}
        made["curve"] = curves + tuple(ref for item in tried for ref in item.trained.ref("curve"))
        if tried:
            weighed = weigh(run, tried, given)
            made["weighing" if quoted.races else "trial"] = weighed.ref("weighing")
            quoted.learn(run.read(weighed, "weighing", Weighing))
    words = {step.name: step.refs["likeness"] for step in run.steps if "likeness" in step.refs}
    return run.call_for(
        "run",
        "quote",
        quoted.settings(),
        plan=planned.ref("plan"),
        likeness=tuple(words[f"select-like-{name}"] for name in quoted.told),
        holdout_tokens=data.ref("holdout_tokens"),
        **made,
    )


def ways(config: Config, pool_rows: int) -> tuple[ArmConfig, ...]:
    """Return the ways of choosing that are quoted, chance first: `auto`'s, or what `score` and `select` describe."""
    named = config.auto.arms or (configured(config, pool_rows),)
    chance = next((arm for arm in named if by_chance(arm)), None)
    if chance is None:
        name = "random" if all(arm.name != "random" for arm in named) else "chance"
        chance = ArmConfig(**{**ARMS["random"], "name": name})
    return (chance, *(arm for arm in named if arm is not chance))


def configured(config: Config, pool_rows: int) -> ArmConfig:
    """Return what `score` and `select` describe, as a way of choosing.

    Raises `ConfigError` where they choose no row of the pool.
    """
    score, select = config.score, config.select
    if select.count == 0:
        raise ConfigError(
            "a quote is of rows chosen from the pool",
            "`select.count` is 0: the target alone is trained on",
            "set `select.fraction` or `auto: {arms: […]}`",
        )
    model = "model" in find(Scorer, name_in(score.scorer, "score.scorer")).reads
    arm = ArmConfig(
        name=CONFIGURED,
        scorer=score.scorer,
        coverage=score.coverage,
        selector=select.selector,
        fraction=select.fraction if select.count is None else min(1.0, select.count / pool_rows),
    )
    return arm.model_copy(update={"passes": 1.0 if model and not by_chance(arm) else 0.0})


def by_chance(arm: ArmConfig) -> bool:
    """Return whether an arm chooses nothing."""
    return arm.selector.get("method") == "random"


class Quoted:
    """The ways of choosing of one quote: who would be raced, who is tried, and which a run takes.

    Args:
        run: its configuration says what a run would do.
        arms: the ways of choosing, chance first.
        plan, limit: what there is to spend.
        told: what words tell of an arm, by its name.
        least: FLOPs of the shortest probe that tells something; 0 where nothing is tried.
    """

    def __init__(
        self,
        run: PipelineRun,
        arms: tuple[ArmConfig, ...],
        plan: Plan,
        limit: float,
        told: Mapping[str, Likeness],
        least: float = 0.0,
    ) -> None:
        self.config, self.plan, self.limit, self.told = run.config, plan, limit, dict(told)
        self.arms = arms
        auto, named = run.config.auto, run.config.auto.arms
        held = contest(named, plan, limit, auto, least, told) if named else None
        self.races = held is not None and len(held.arms) > 1
        self.probe = int(max(auto.probe_share * limit, least))
        self.standing = tuple(
            arm
            for arm in (of_the_kind(arm, told.get(arm.name)) for arm in self.arms)
            if by_chance(arm) or not left_out(arm, plan, limit, auto, least, told.get(arm.name))
        )
        self.follows = self.arms[-1]
        if held is not None:
            self.follows = held.arms[0]
            if self.races:
                self.standing, self.probe = held.arms, int(held.probe_flops)

    def learn(self, weighing: Weighing) -> None:
        """Let a run take what its race is seen to choose."""
        if self.races:
            self.follows = next(arm for arm in self.standing if arm.name == weighing.chosen)

    def settings(self) -> dict[str, Frozen]:
        """Return the sections that the stage reads: every arm with its share of the pool, and the one a run takes."""
        chance, *others = (of_the_kind(arm, self.told.get(arm.name)) for arm in self.arms)
        told = {name: place for place, name in enumerate(self.told)}
        in_order = (chance, *sorted(others, key=lambda arm: told.get(arm.name, len(told))))
        arms = tuple(
            arm.model_copy(update={"fraction": min(1.0, share_of(arm, self.plan, self.limit))}) for arm in in_order
        )
        taken = sections(self.config, self.follows, share_of(self.follows, self.plan, self.limit))
        return {**taken, "auto": self.config.auto.model_copy(update={"arms": arms})}


def _tokens(run: PipelineRun, data: Result, split: str) -> int:
    table = read_table(run.store.open(data.refs[split]) / TABLE_FILE)
    return int(table.column("n_tokens").to_numpy().sum())


def _room_for_one(auto: AutoConfig, config: Config, plan: Plan, pool_rows: int, limit: float, reading: float) -> bool:
    """Return whether the shortest probe of chance fits, by the plan alone: a step is of rows of mean length."""
    step = plan.micro_batch * plan.accumulation * max(1, plan.workers) * plan.pass_flops / pool_rows
    least = auto.least_steps * step + min(auto.least_steps, PROBE_EVALUATIONS) * reading
    return max(auto.probe_share * limit, least) <= SHARE * limit


def _probes(run: PipelineRun, quoted: Quoted, shared: Mapping[str, tuple[Ref, ...]], target: float) -> list[Tried]:
    """Try arms while there is room, and return them in the order in which a race weighs them.

    `target` are the FLOPs of a training pass over the target.
    """
    plan, limit, auto = quoted.plan, quoted.limit, run.config.auto
    before, tried = len(run.steps), list[Tried]()

    def fits(arm: ArmConfig) -> bool:
        spent = sum({step.run: step.cost.flops for step in run.steps[before:]}.values())
        scoring = SLACK * (auto.sample * expected_price(arm, plan) + target) if arm.passes else 0.0
        return spent + scoring + quoted.probe <= SHARE * limit

    for arm in sorted(quoted.standing, key=lambda arm: (not by_chance(arm), expected_price(arm, plan))):
        if not fits(arm):
            run.notice(
                f"{arm.name} is not probed: with it probes would take more than {SHARE:.0%} of what may be spent"
            )
        elif tried or by_chance(arm):
            try:
                tried.append(tried_arm(run, arm, plan, limit, quoted.probe, shared))
            except CANNOT_WORK as error:
                run.notice(f"{arm.name} is not probed: {error.found} ({error.remedy})")
    places: Sequence[str] = [arm.name for arm in quoted.standing]
    return sorted(tried, key=lambda item: (not by_chance(item.arm), places.index(item.arm.name)))
