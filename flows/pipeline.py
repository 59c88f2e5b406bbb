"""The pipeline, whole: from a configuration to a verdict on a model that was trained on what is worth training on.

It reads as the list of what is done. Each call returns references only; what has been done before for the same work is
adopted, not repeated. What each stage computes is in `stages/`, how and where a call is made in `calling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefect import flow

from data_contracts.records import Decision, Plan, Promotion, Ref, Result, Verdict
from flows.lineage import Start, compared, start_of
from flows.mixing import follows, mixed
from flows.order import ConfigFile, Place
from flows.outcome import Outcome
from flows.pipeline_run import PipelineRun, opened
from flows.race import race
from flows.reading import reads_scores, refuse_unpayable
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
    base, pool, target = data.ref("base"), data.ref("pool_tokens"), data.ref("target_tokens")
    validation, retention = data.ref("validation_tokens"), data.ref("retention_tokens")

    # How training fits the budget, and a charged warm-up on a random selection: moments, losses, noise.
    planned = first_plan(run, data)
    plan = planned.ref("plan")
    start = start_of(run, data, planned)
    begun = warmed_up(run, data, plan, start)
    checkpoint, selection = begun.ref("checkpoint"), begun.ref("selection")
    scores: tuple[Ref, ...] = ()
    features: tuple[Ref, ...] = ()
    mixture: tuple[Ref, ...] = ()
    unmixed = 0
    curves, checkpoints, losses = begun.ref("curve"), checkpoint, begun.ref("example_losses")
    selections, scorings = start.selections + selection, scores
    latest = start.scores
    decided = first_decision(run, data, plan, begun, start)
    decision = run.read(decided, "decision", Decision)

    # The loop: plan anew, score, mix, select, train, and ask whether more is worth its price.
    while not decision.stops:
        run.next_round()
        if decision.replans:
            planned = planned_anew(run, data, checkpoint, curves)
            plan = planned.ref("plan")
        # Where ways of choosing are named, words tell of each or a short training does; the one that pays goes on.
        weighing: tuple[Ref, ...] = ()
        won, ranked = None, latest
        if run.races:
            won = race(
                run,
                planned=planned,
                decided=decided,
                base=base,
                checkpoint=checkpoint,
                pool=data.ref("pool"),
                target=data.ref("target"),
                validation=data.ref("validation"),
                pool_tokens=pool,
                target_tokens=target,
                validation_tokens=validation,
                example_losses=losses,
                validation_losses=begun.ref("validation_losses"),
                retention_tokens=retention,
                retention_reference=begun.ref("retention_losses"),
            )
        if won is not None:
            segment, weighing = won.trained, won.weighed.ref("weighing")
            selection, scores, features, scorings = won.selection, won.scores, won.features, won.scores
            latest = scores or latest
            mixture, unmixed = won.mixture, len(losses)
            selections += won.selections
        else:
            if decision.rescores and reads_scores(run.config.select):
                refuse_unpayable(run.config.score, run.read(planned, "plan", Plan), decision)
                scored = run.call(
                    "score",
                    base=base,
                    plan=plan,
                    checkpoint=checkpoint,
                    pool_tokens=pool,
                    target_tokens=target,
                    pool=data.ref("pool"),
                    target=data.ref("target"),
                    example_losses=losses,
                    previous_scores=scorings,
                )
                scores, features = scored.ref("scores"), scored.ref("features")
                scorings += scores
                latest = scores
            if decision.reselects:
                mixture = mixed(
                    run.config,
                    run.call,
                    base=base,
                    plan=plan,
                    checkpoint=checkpoint,
                    pool_tokens=pool,
                    target_tokens=target,
                    scores=scores,
                    features=features,
                    previous=mixture,
                    example_losses=losses[unmixed:],
                )
                unmixed = len(losses)
                selected = run.call(
                    "select",
                    pool_tokens=pool,
                    scores=scores,
                    features=features,
                    target_tokens=target,
                    plan=plan,
                    mixture=mixture,
                    pool=data.ref("pool"),
                    target=data.ref("target"),
                    example_losses=losses,
                    other_scores=scorings[:-1],
                )
                selection = selected.ref("selection")
                selections += selection
            segment = run.call(
                "train",
                base=base,
                plan=plan,
                tokens=pool + target,
                selection=selection,
                validation_tokens=validation,
                target_tokens=target,
                retention_tokens=retention,
                retention_reference=begun.ref("retention_losses"),
                checkpoint=checkpoint,
                decision=decided.ref("decision"),
            )
        checkpoint = segment.ref("end") or segment.ref("checkpoint")
        curves += segment.ref("curve")
        checkpoints += segment.ref("checkpoint")
        losses += segment.ref("example_losses")
        earlier, now = compared(run.store, ranked, latest)
        decided = run.call(
            "govern",
            curve=curves,
            checkpoint=checkpoints,
            plan=plan,
            decision=decided.ref("decision"),
            weighing=weighing,
            mixture=mixture if follows(run.config) else (),
            earlier_scores=earlier,
            scores=now,
        )
        decision = run.read(decided, "decision", Decision)

    best = tuple(ref for ref in checkpoints if ref.digest == decision.best)[:1]
    return Trained(data, planned, best, selections)


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


def planned_anew(run: PipelineRun, data: Result, checkpoint: tuple[Ref, ...], curves: tuple[Ref, ...]) -> Result:
    """Plan again from what the segments so far have shown."""
    return run.call(
        "plan",
        base=data.ref("base"),
        pool=data.ref("pool"),
        pool_tokens=data.ref("pool_tokens"),
        target_tokens=data.ref("target_tokens"),
        checkpoint=checkpoint,
        curve=curves,
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
