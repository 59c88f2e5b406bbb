"""A pipeline run: its configuration, its store, the steps made so far, and how it ended.

`opened` opens one and closes it with a true status whatever ends it; `call` names each stage call and remembers it. How
a call is made is `calling`'s business, in which order they are made the pipeline's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from data_contracts.config import Config
from data_contracts.cost import Frozen
from data_contracts.errors import LazyTrainError
from data_contracts.records import Decision, Origin, Plan, Promotion, Ref, Result, Summary, Table, Verdict
from data_contracts.store import Store
from flows.calling import REPORTER, call
from flows.labels import sign
from flows.order import Place
from flows.outcome import Outcome, Step
from flows.reconcile import reconcile
from flows.rounds import as_subflow
from flows.standing import Key, Raised, check, key_of, standing
from flows.workspace import Workspace
from stages.ending import ended_by
from stages.work import Silent

R = TypeVar("R", bound=Frozen)
S = TypeVar("S")
Make = Callable[..., Result]


class Turn(Protocol):
    """How a turn of the loop is done."""

    def __call__(self, number: int, turn: Callable[[], S], /) -> S:
        """Do `turn`, the loop's of that number, and return what it returns."""


def here(number: int, turn: Callable[[], S]) -> S:
    """Do a turn of the loop as it is."""
    return turn()


class PipelineRun:
    """One run of the pipeline: its configuration, its store, and the steps made so far."""

    def __init__(
        self,
        workspace: Workspace,
        store: Store,
        run: str,
        make: Make = call,
        stands: Mapping[Key, Result] | None = None,
        turn: Turn = here,
    ) -> None:
        """Make a run that has made no step.

        Args:
            workspace, store, run: its configuration, its store and its id there.
            make: makes a stage call; the default is a Prefect task or a deployment's run (see `calling`).
            stands: what stands of the run that it goes on with (see `standing`).
            turn: does a turn of the loop; `opened` makes each a flow run of its own (see `rounds`).
        """
        self.workspace, self.store, self.run, self._make, self._turn = workspace, store, run, make, turn
        self._stands = stands or {}
        self.steps: list[Step] = []
        self.decisions: list[Decision] = []
        self.round = 0
        self._started = time.monotonic()

    @property
    def config(self) -> Config:
        """The configuration, as it stands for the calls to come."""
        return self.workspace.config

    @property
    def races(self) -> bool:
        """Whether this round tries several ways of choosing: the first one does, where they are named."""
        return self.round == 1 and bool(self.config.auto.arms)

    def next_round(self) -> None:
        """Begin a new round: later calls are named for it."""
        self.round += 1

    def turn(self, done: Callable[[], S]) -> S:
        """Turn the loop once more: what is `done` is the new round, and its calls are named for it."""
        self.next_round()
        return self._turn(self.round, done)

    def call(self, verb: str, *, refresh: bool = False, **inputs: tuple[Ref, ...]) -> Result:
        """Call stage `verb`; named for the stage and, inside the loop, the round.

        Args:
            verb: the stage.
            refresh: make a new attempt even where a commit exists.
            inputs: references by input name; an empty tuple is an input that was not given.
        """
        looped = self.round > 0 and verb in ("plan", "score", "mix", "select", "train", "govern", "weigh")
        name = f"{verb}-round-{self.round}" if looped else verb
        return self._call(self.workspace, verb, name, inputs, refresh)

    def call_for(self, arm: str, verb: str, settings: Mapping[str, Frozen], /, **inputs: tuple[Ref, ...]) -> Result:
        """Call stage `verb` for one way of choosing, with its sections in place of the configuration's."""
        return self._call(self.workspace.with_sections(settings), verb, f"{verb}-{arm}", inputs, False)

    def _call(
        self, workspace: Workspace, verb: str, name: str, inputs: dict[str, tuple[Ref, ...]], refresh: bool
    ) -> Result:
        origin = Origin(run=self.run, name=name, round=self.round if "-" in name else None)
        stands = None if refresh else self._stands.get(key_of(verb, inputs))
        if stands is not None:
            return self.adopted(name, stands)
        return self._took(name, self._make(workspace, verb, inputs, origin=origin, refresh=refresh))

    def adopted(self, name: str, result: Result) -> Result:
        """Let a result of an earlier run be that of call `name`."""
        self.store.note_result(self.run, name, result)
        return self._took(name, result)

    def _took(self, name: str, result: Result) -> Result:
        self.steps.append(
            Step(
                name=name,
                stage=result.stage,
                run=result.run,
                cached=result.cached,
                costs=result.costs,
                refs=result.refs,
            )
        )
        return result

    def notice(self, text: str) -> None:
        """Tell the user something; without a screen it goes to the log."""
        (REPORTER.get() or Silent()).notice(text)

    def settle(self, settings: Mapping[str, Frozen]) -> None:
        """Let sections of the configuration be those that were found to pay, for all calls from here on."""
        self.workspace = self.workspace.with_sections(settings)

    def read(self, result: Result, output: str, kind: type[R]) -> R:
        """Read a record that a call gave."""
        record = self.store.record(result.refs[output], kind)
        if isinstance(record, Decision) and record not in self.decisions:
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
        price = self.workspace.config.budget.price
        last = {step.stage: step.run for step in self.steps}
        selected, weighed = last.get("select"), last.get("weigh")
        return Outcome(
            run=self.run,
            name=self.workspace.config.name,
            seconds=time.monotonic() - self._started,
            steps=tuple(self.steps),
            ledger=self.store.ledger(refs, lost=True).priced(price),
            amortised=self.store.ledger(refs, lost=True, users=self.store.users()).priced(price).total,
            decisions=tuple(self.decisions),
            plan=plan,
            selection=self.store.read_manifest(selected).summary if selected else None,
            weighing=self.store.read_manifest(weighed).summary if weighed else None,
            evaluation=self.store.read_manifest(last["evaluate"]).summary,
            verdict=verdict,
            promotion=promotion,
        )


@contextmanager
def opened(
    workspace: Workspace,
    *,
    stages: Place = "in_process",
    name: str = "",
    resumes: str | None = None,
    raised: Raised | None = None,
) -> Iterator[PipelineRun]:
    """Open a pipeline run for a configuration, by its name or `name`, and close it with how it ended.

    Args:
        workspace: the configuration that was read.
        stages: where its stages run.
        name: what the run is called; unset is the configuration's name.
        resumes: the past run that it goes on with, by the configuration recorded then.
        raised: sections of limits that are others than recorded (see `standing`).
    """
    sign()
    reconcile()
    store = Store(workspace.address)
    check(raised or {}, resumes)
    if resumes is not None:
        workspace = workspace.recorded(store.run_config(resumes), raised)
    if stages == "in_process":
        workspace.check()  # elsewhere the stages' own runners are asked
    making, called = partial(call, stages=stages), name or workspace.config.name
    with recorded(workspace, store, making, called, resumes, as_subflow) as made:
        yield made


@contextmanager
def recorded(
    workspace: Workspace, store: Store, make: Make, name: str, resumes: str | None = None, turn: Turn = here
) -> Iterator[PipelineRun]:
    """Open a pipeline run called `name` in the store, made by `make` and `turn`, and close it with how it ended."""
    stands = standing(store, resumes, workspace) if resumes is not None else None
    run = store.open_run(name, workspace.config.model_dump(mode="json"), resumes=resumes)
    pipeline_run = PipelineRun(workspace, store, run, make, stands, turn)
    try:
        yield pipeline_run
    except BaseException as error:
        if isinstance(error, SystemExit) or ended_by(error) is not None:
            store.close_run(run, "KILLED", pipeline_run.summary(), "terminated")
            raise
        reason = error.found if isinstance(error, LazyTrainError) else f"{type(error).__name__}: {error}"
        store.close_run(run, "FAILED", pipeline_run.summary(), reason)
        raise
    store.close_run(run, "FINISHED", pipeline_run.summary())
