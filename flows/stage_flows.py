"""How a stage is called: one function, one Prefect task a call, references in and out.

`opened` gives a pipeline run whose `call` builds the request and hands it to the runner in this process. Each stage is
also a flow of its own here, for deployments: it works on the inputs of a past run, or on references given to it.
A result that was committed before shows as `Cached`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from prefect import Flow, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from data_contracts.cost import Frozen
from data_contracts.errors import LazyTrainError
from data_contracts.records import Decision, Origin, Plan, Promotion, Ref, Request, Result, Summary, Table, Verdict
from data_contracts.store import Store
from flows.outcome import Outcome, Step
from flows.present import publish
from flows.workspace import CONFIG_FILE, Workspace
from stages.runner import run as run_stage
from stages.work import Reporter

R = TypeVar("R", bound=Frozen)
REPORTER: ContextVar[Reporter | None] = ContextVar("reporter", default=None)
"""Who shows progress and notices; the command sets it, a worker leaves it unset."""


@task(task_run_name="{request.origin.name}", cache_policy=NO_CACHE, persist_result=False, log_prints=False)
def stage_call(request: Request, pipeline: str) -> Result | State[Result]:
    """Do one stage's work, or adopt its commit; show the plan, the decision and the verdict as Prefect artifacts."""
    result = run_stage(request, reporter=REPORTER.get())
    if result.refs:
        manifest = Store(request.store).read_manifest(result.run)
        publish(pipeline, request.verb, request.origin.name, manifest.summary, result.costs)
    return Completed(name="Cached", data=result) if result.cached else result


def call(
    workspace: Workspace,
    verb: str,
    inputs: dict[str, tuple[Ref, ...]],
    *,
    origin: Origin,
    refresh: bool = False,
) -> Result:
    """Make one stage call as a Prefect task and return its result.

    Args:
        workspace: the configuration; `workspace.config.slice(verb)` is what the stage reads.
        verb: the stage.
        inputs: references by input name; an empty tuple is an input that was not given.
        origin: who asks, recorded with the attempt.
        refresh: make a new attempt even where a commit exists.
    """
    request = Request(
        verb=verb,
        config=workspace.config.slice(verb),
        inputs={name: refs for name, refs in inputs.items() if refs},
        store=workspace.address,
        origin=origin,
        knobs={"root": str(workspace.root)},
        refresh=refresh,
    )
    answer = stage_call(request, workspace.config.name)
    return answer.result() if isinstance(answer, State) else answer


class PipelineRun:
    """One run of the pipeline: its configuration, its store, and the steps made so far."""

    def __init__(self, workspace: Workspace, store: Store, run: str) -> None:
        self.workspace, self.store, self.run = workspace, store, run
        self.steps: list[Step] = []
        self.decisions: list[Decision] = []
        self.round = 0
        self._started = time.monotonic()

    def next_round(self) -> None:
        """Turn the loop once more: later calls are named for the new round."""
        self.round += 1

    def call(self, verb: str, *, refresh: bool = False, **inputs: tuple[Ref, ...]) -> Result:
        """Call stage `verb`; named for the stage and, inside the loop, the round.

        Args:
            verb: the stage.
            refresh: make a new attempt even where a commit exists.
            inputs: references by input name; an empty tuple is an input that was not given.
        """
        looped = self.round > 0 and verb in ("plan", "score", "select", "train", "govern")
        name = f"{verb}-round-{self.round}" if looped else verb
        origin = Origin(run=self.run, name=name, round=self.round if looped else None)
        result = call(self.workspace, verb, inputs, origin=origin, refresh=refresh)
        self.steps.append(
            Step(
                name=name,
                stage=verb,
                run=result.run,
                cached=result.cached,
                costs=result.costs,
                refs=result.refs,
            )
        )
        return result

    def read(self, result: Result, output: str, kind: type[R]) -> R:
        """Read a record that a call gave."""
        record = self.store.record(result.refs[output], kind)
        if isinstance(record, Decision):
            self.decisions.append(record)
        return record

    def champion(self, candidate: tuple[Ref, ...]) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
        """Return (checkpoint, base) of the registered champion to compare with; empty where there is none.

        A candidate that already is the champion is not compared with itself but with the one it replaced, so that
        running the same work again asks the same question and adopts the same verdict.
        """
        settings = self.workspace.config.promote
        registry = self.store.registry()
        current = registry.current(settings.registered_model, settings.alias)
        champion = current.checkpoint if current is not None else None
        if champion is not None and candidate and champion.digest == candidate[0].digest:
            champion = registry.replaced(settings.registered_model, settings.alias)
        if champion is None:
            return (), ()
        return (champion,), self.store.read_manifest(champion.run).inputs["base"]

    def summary(self) -> Summary:
        """Return what this run did so far, for its record in the store."""
        rows = tuple((step.name, step.cached, step.cost.flops, step.run) for step in self.steps)
        return Summary(
            title=f"{len(rows)} stage calls, {sum(step.cached for step in self.steps)} reused",
            measured={"seconds": round(time.monotonic() - self._started, 3)},
            tables=(Table(title="Stages", columns=("stage", "reused", "FLOPs", "attempt"), rows=rows),),
        )

    def outcome(self, plan: Plan, verdict: Verdict, promotion: Promotion) -> Outcome:
        """Return what came of this run."""
        refs = [ref for step in self.steps for ref in step.refs.values()]
        last = {step.stage: step.run for step in self.steps}
        selected = last.get("select")
        return Outcome(
            run=self.run,
            name=self.workspace.config.name,
            seconds=time.monotonic() - self._started,
            steps=tuple(self.steps),
            flops={stage: cost.flops for stage, cost in self.store.ledger(refs).by_stage().items()},
            decisions=tuple(self.decisions),
            plan=plan,
            selection=self.store.read_manifest(selected).summary if selected else None,
            evaluation=self.store.read_manifest(last["evaluate"]).summary,
            verdict=verdict,
            promotion=promotion,
        )


@contextmanager
def opened(config_file: str, name: str = "") -> Iterator[PipelineRun]:
    """Open a pipeline run for a configuration file, by its name or `name`, and close it with how it ended.

    Raises `ConfigError` before anything is opened where the file is missing or invalid.
    """
    workspace = Workspace.read(config_file)
    store = Store(workspace.address)
    run = store.open_run(name or workspace.config.name, workspace.config.model_dump(mode="json"))
    pipeline_run = PipelineRun(workspace, store, run)
    try:
        yield pipeline_run
    except (KeyboardInterrupt, SystemExit):
        store.close_run(run, "KILLED", pipeline_run.summary(), "terminated")
        raise
    except Exception as error:
        reason = error.found if isinstance(error, LazyTrainError) else f"{type(error).__name__}: {error}"
        store.close_run(run, "FAILED", pipeline_run.summary(), reason)
        raise
    store.close_run(run, "FINISHED", pipeline_run.summary())


class StageOrder(Frozen):
    """What a stage's own flow is asked to do, as a form in the Prefect UI."""

    run: str | None = Field(None, description="Past pipeline run whose inputs are used.")
    round: int | None = Field(None, ge=1, description="Round of that run; unset is the stage's last call.")
    inputs: dict[str, tuple[Ref, ...]] = Field(
        default_factory=dict, description="References by input name; they stand in for the past run's."
    )
    refresh: bool = Field(False, description="Make a new attempt even where a commit exists.")


def past_inputs(store: Store, run: str, verb: str, round_number: int | None) -> dict[str, tuple[Ref, ...]]:
    """Return the inputs of a past run's call of `verb`: of round `round_number`, or of its last call.

    Raises `ArtifactError` where that run did not get so far.
    """
    name = verb if round_number is None else f"{verb}-round-{round_number}"
    return store.find_attempt(run, name).inputs


def run_alone(verb: str, config_file: str, order: StageOrder) -> Result:
    """Run one stage by itself, as a pipeline run of its own; a past run that lends its inputs is left as it is."""
    workspace = Workspace.read(config_file)
    store = Store(workspace.address)
    inputs = {**(past_inputs(store, order.run, verb, order.round) if order.run else {}), **order.inputs}
    with opened(config_file, name=f"{workspace.config.name}-{verb}") as run:
        return run.call(verb, refresh=order.refresh, **inputs)


def stage_flow(verb: str) -> Flow[[str, StageOrder], Result]:
    """Return the flow that runs stage `verb` alone."""

    @flow(name=verb, flow_run_name=verb, log_prints=False, persist_result=False)
    def alone(config_file: str = CONFIG_FILE, order: StageOrder = StageOrder()) -> Result:  # noqa: B008 - immutable
        return run_alone(verb, config_file, order)

    alone.description = f"The stage {verb} by itself, on the inputs of a past run or on references given to it."
    return alone


ingest = stage_flow("ingest")
plan = stage_flow("plan")
begin = stage_flow("begin")
score = stage_flow("score")
select = stage_flow("select")
train = stage_flow("train")
govern = stage_flow("govern")
evaluate = stage_flow("evaluate")
judge = stage_flow("judge")
promote = stage_flow("promote")
_ALONE = (ingest, plan, begin, score, select, train, govern, evaluate, judge, promote)
STAGE_FLOWS = {item.name: item for item in _ALONE}
