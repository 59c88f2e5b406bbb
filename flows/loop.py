"""The loop of a pipeline: what a turn begins with, and the calls of one turn.

A turn takes a state of references only and returns the next one; it changes nothing else. So it may be a flow run of
its own (`rounds`) or be done as it is, with the same calls under the same names. When the loop ends, and what stands
before and after it, is left to `pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from data_contracts.records import Decision, Plan, Ref, Result
from flows.lineage import compared
from flows.mixing import follows, mixed
from flows.pipeline_run import PipelineRun
from flows.race import Won, race
from flows.reading import reads_scores, refuse_unpayable


@dataclass(frozen=True)
class Loop:
    """What a turn of the loop begins with and leaves to the next; what was not made is empty.

    Attributes:
        planned, decided: the plan and the decision that stand.
        checkpoint: where training goes on from.
        selection, scores, features, mixture: the latest that this run made.
        latest: the latest scoring, of an earlier run until this one scores.
        curves, checkpoints, losses: of every segment, the warm-up first.
        selections: all that was trained on.
        scorings: all that can stand beside the latest.
        unmixed: how many of `losses` the mixture has read.
    """

    planned: Result
    decided: Result
    checkpoint: tuple[Ref, ...]
    selection: tuple[Ref, ...]
    latest: tuple[Ref, ...]
    curves: tuple[Ref, ...]
    checkpoints: tuple[Ref, ...]
    losses: tuple[Ref, ...]
    selections: tuple[Ref, ...]
    scorings: tuple[Ref, ...] = ()
    scores: tuple[Ref, ...] = ()
    features: tuple[Ref, ...] = ()
    mixture: tuple[Ref, ...] = ()
    unmixed: int = 0


def one_turn(run: PipelineRun, data: Result, begun: Result, loop: Loop, decision: Decision) -> Loop:
    """Make the calls of one turn of the loop, as `decision` asks for them, and return what the next begins with."""
    ranked, weighing = loop.latest, tuple[Ref, ...]()
    if decision.replans:
        loop = replace(loop, planned=planned_anew(run, data, loop.checkpoint, loop.curves))
    # Where ways of choosing are named, words tell of each or a short training does; the one that pays goes on.
    won = raced(run, data, begun, loop) if run.races else None
    if won is not None:
        segment, weighing = won.trained, won.weighed.ref("weighing")
        loop = replace(
            loop,
            scores=won.scores,
            features=won.features,
            scorings=won.scores,
            latest=won.scores or loop.latest,
            mixture=won.mixture,
            unmixed=len(loop.losses),
            selection=won.selection,
            selections=loop.selections + won.selections,
        )
    else:
        if decision.rescores and reads_scores(run.config.select):
            refuse_unpayable(run.config.score, run.read(loop.planned, "plan", Plan), decision)
            loop = scored(run, data, loop)
        if decision.reselects:
            loop = selected(run, data, loop)
        segment = one_segment(run, data, begun, loop)
    loop = replace(
        loop,
        checkpoint=segment.ref("end") or segment.ref("checkpoint"),
        curves=loop.curves + segment.ref("curve"),
        checkpoints=loop.checkpoints + segment.ref("checkpoint"),
        losses=loop.losses + segment.ref("example_losses"),
    )
    earlier, now = compared(run.store, ranked, loop.latest)
    decided = run.call(
        "govern",
        curve=loop.curves,
        checkpoint=loop.checkpoints,
        plan=loop.planned.ref("plan"),
        decision=loop.decided.ref("decision"),
        weighing=weighing,
        mixture=loop.mixture if follows(run.config) else (),
        earlier_scores=earlier,
        scores=now,
    )
    return replace(loop, decided=decided)


def raced(run: PipelineRun, data: Result, begun: Result, loop: Loop) -> Won | None:
    """Race the ways of choosing that are named."""
    return race(
        run,
        planned=loop.planned,
        decided=loop.decided,
        base=data.ref("base"),
        checkpoint=loop.checkpoint,
        pool=data.ref("pool"),
        target=data.ref("target"),
        validation=data.ref("validation"),
        pool_tokens=data.ref("pool_tokens"),
        target_tokens=data.ref("target_tokens"),
        validation_tokens=data.ref("validation_tokens"),
        example_losses=loop.losses,
        validation_losses=begun.ref("validation_losses"),
        retention_tokens=data.ref("retention_tokens"),
        retention_reference=begun.ref("retention_losses"),
    )


def scored(run: PipelineRun, data: Result, loop: Loop) -> Loop:
    """Say what each pool example is worth, with the checkpoint that stands."""
    made = run.call(
        "score",
        base=data.ref("base"),
        plan=loop.planned.ref("plan"),
        checkpoint=loop.checkpoint,
        pool_tokens=data.ref("pool_tokens"),
        target_tokens=data.ref("target_tokens"),
        pool=data.ref("pool"),
        target=data.ref("target"),
        example_losses=loop.losses,
        previous_scores=loop.scorings,
    )
    scores = made.ref("scores")
    return replace(loop, scores=scores, features=made.ref("features"), scorings=loop.scorings + scores, latest=scores)


def selected(run: PipelineRun, data: Result, loop: Loop) -> Loop:
    """Mix where the configuration asks for it, and choose what is trained on next."""
    mixture = mixed(
        run.config,
        run.call,
        base=data.ref("base"),
        plan=loop.planned.ref("plan"),
        checkpoint=loop.checkpoint,
        pool_tokens=data.ref("pool_tokens"),
        target_tokens=data.ref("target_tokens"),
        scores=loop.scores,
        features=loop.features,
        previous=loop.mixture,
        example_losses=loop.losses[loop.unmixed :],
    )
    made = run.call(
        "select",
        pool_tokens=data.ref("pool_tokens"),
        scores=loop.scores,
        features=loop.features,
        target_tokens=data.ref("target_tokens"),
        plan=loop.planned.ref("plan"),
        mixture=mixture,
        pool=data.ref("pool"),
        target=data.ref("target"),
        example_losses=loop.losses,
        other_scores=loop.scorings[:-1],
    )
    selection = made.ref("selection")
    return replace(
        loop,
        mixture=mixture,
        unmixed=len(loop.losses),
        selection=selection,
        selections=loop.selections + selection,
    )


def one_segment(run: PipelineRun, data: Result, begun: Result, loop: Loop) -> Result:
    """Train one segment on what is selected."""
    return run.call(
        "train",
        base=data.ref("base"),
        plan=loop.planned.ref("plan"),
        tokens=data.ref("pool_tokens") + data.ref("target_tokens"),
        selection=loop.selection,
        validation_tokens=data.ref("validation_tokens"),
        target_tokens=data.ref("target_tokens"),
        retention_tokens=data.ref("retention_tokens"),
        retention_reference=begun.ref("retention_losses"),
        checkpoint=loop.checkpoint,
        decision=loop.decided.ref("decision"),
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
