"""The pipeline, whole: from a configuration to a verdict on a model that was trained on what is worth training on.

It reads as the list of what is done, a turn of its loop in `loop`. Each call returns references only; what has been
done before for the same work is adopted, not repeated. What each stage computes is in `stages/`, how and where a call
is made in `calling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect import flow

from data_contracts.records import Decision, Plan, Promotion, Ref, Result, Verdict
from flows.lineage import Start, start_of
from flows.loop import Loop, one_turn
from flows.order import ConfigFile, Place
from flows.outcome import Outcome
from flows.pipeline_run import PipelineRun, opened
from flows.workspace import CONFIG_FILE, Workspace


@flow(name="pipeline", flow_run_name="pipeline-{config_file}", log_prints=False, persist_result=False)
def pipeline(
    config_file: ConfigFile = CONFIG_FILE,
    stages: Place = "in_process",
    resumes: str | None = None,
    raised: dict[str, dict[str, Any]] | None = None,
) -> Outcome:
    """Run the chain of one configuration file and return what came of it.

    Args:
        config_file: The YAML file, where the worker can read it; relative paths in it start from its folder.
        stages: Where the stages run: in this process, or each as its deployment of that name, with the same result.
        resumes: A past run to go on with, by the configuration it recorded; unset goes by the file as it stands.
        raised: Limits that it goes on with where they are others than recorded, as {budget: {flops: …}}.
    """
    with opened(Workspace.read(config_file), stages=stages, resumes=resumes, raised=raised) as run:
        return concluded(run, trained(run))


@dataclass(frozen=True)
class Trained:
    """What the loop leaves: the data, the plan that stood last, the best checkpoint, and all that was chosen."""

    data: Result
    planned: Result
    candidate: tuple[Ref, ...]
    selections: tuple[Ref, ...]


def trained(run: PipelineRun) -> Trained:
    """Make the calls of one run up to the decision that stops it."""
    # The splits, tokenised, and the base model pinned by digest.
    data = run.call("ingest")

    # How training fits the budget, and a charged warm-up on a random selection: moments, losses, noise.
    planned = first_plan(run, data)
    start = start_of(run, data, planned)
    begun = warmed_up(run, data, planned.ref("plan"), start)
    loop = Loop(
        planned=planned,
        decided=first_decision(run, data, planned.ref("plan"), begun, start),
        checkpoint=begun.ref("checkpoint"),
        selection=begun.ref("selection"),
        latest=start.scores,
        curves=begun.ref("curve"),
        checkpoints=begun.ref("checkpoint"),
        losses=begun.ref("example_losses"),
        selections=start.selections + begun.ref("selection"),
    )

    # The loop, each turn a round: plan anew, score, mix, select, train, and ask whether more is worth its price.
    while not (decision := run.read(loop.decided, "decision", Decision)).stops:
        loop = run.turn(partial(one_turn, run, data, begun, loop, decision))

    best = tuple(ref for ref in loop.checkpoints if ref.digest == decision.best)[:1]
    return Trained(data, loop.planned, best, loop.selections)


def first_plan(run: PipelineRun, data: Result) -> Result:
    """Plan how training fits, before anything was trained."""
    pool, target = data.ref("pool_tokens"), data.ref("target_tokens")
    return run.call("plan", base=data.ref("base"), pool=data.ref("pool"), pool_tokens=pool, target_tokens=target)


def warmed_up(run: PipelineRun, data: Result, plan: tuple[Ref, ...], start: Start) -> Result:
    """Train the warm-up, or take the one that stands in for it."""
    pool, validation = data.ref("pool_tokens"), data.ref("validation_tokens")
    return start.begun or run.call(
        "begin",
        base=data.ref("base"),
        plan=plan,
        pool_tokens=pool,
        validation_tokens=validation,
        retention_tokens=data.ref("retention_tokens"),
        start_from=start.checkpoint,
    )


def first_decision(run: PipelineRun, data: Result, plan: tuple[Ref, ...], begun: Result, start: Start) -> Result:
    """Decide what follows the warm-up."""
    return run.call(
        "govern",
        curve=begun.ref("curve"),
        checkpoint=begun.ref("checkpoint"),
        plan=plan,
        target_tokens=data.ref("target_tokens") if start.target else (),
        earlier_target=start.target,
    )


def concluded(run: PipelineRun, made: Trained) -> Outcome:
    """Make the calls that judge what was trained, and return what came of the run."""
    data, candidate, base = made.data, made.candidate, made.data.ref("base")
    # The best checkpoint against the base and the current champion, on the holdout; the verdict is pure.
    champion, champion_base = run.champion(candidate)
    evaluated = run.call(
        "evaluate",
        base=base,
        holdout=data.ref("holdout"),
        holdout_tokens=data.ref("holdout_tokens"),
        checkpoint=candidate,
        champion=champion,
        champion_base=champion_base,
    )
    judged = run.call(
        "judge",
        evaluation=evaluated.ref("evaluation"),
        candidate=candidate,
        champion=champion,
        selection=made.selections,
        pool=data.ref("pool"),
        target=data.ref("target"),
        holdout=data.ref("holdout"),
    )
    # The only effect: a registry alias moved, if it still is what the verdict saw.
    promoted = run.call(
        "promote",
        verdict=judged.ref("verdict"),
        candidate=candidate,
        base=base,
        evaluation=evaluated.ref("evaluation"),
        plan=made.planned.ref("plan"),
    )
    return run.outcome(
        plan=run.read(made.planned, "plan", Plan),
        verdict=run.read(judged, "verdict", Verdict),
        promotion=run.read(promoted, "promotion", Promotion),
    )
