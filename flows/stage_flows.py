"""Each stage as a flow of its own, for deployments: on the inputs of a past run, or on references given to it.

A pipeline that runs its stages as deployments calls the same flows: then the work belongs to that pipeline's run. By
itself a stage is a pipeline run of its own, and a past run that lends its inputs is left as it is.
"""

from __future__ import annotations

from typing import Any

from prefect import Flow, flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from data_contracts.errors import LazyTrainError
from data_contracts.records import Ref, Result
from data_contracts.store import Store
from flows.calling import CACHED, call
from flows.labels import sign, tell
from flows.order import ConfigFile, Settings, StageOrder, settings_of
from flows.pipeline_run import opened
from flows.workspace import CONFIG_FILE, Workspace


def past_inputs(store: Store, run: str, verb: str, round_number: int | None) -> dict[str, tuple[Ref, ...]]:
    """Return the inputs of a past run's call of `verb`: of round `round_number`, or of its last call.

    Raises `ArtifactError` where that run did not get so far.
    """
    name = verb if round_number is None else f"{verb}-round-{round_number}"
    return store.find_attempt(run, name).inputs


def run_alone(verb: str, config_file: str, order: StageOrder, settings: Settings | None = None) -> Result:
    """Run one stage: for the pipeline that calls it, or as a pipeline run of its own."""
    workspace = Workspace.read(config_file)
    workspace = settings.over(workspace) if settings is not None else workspace
    if order.caller is not None:
        sign()
        return call(workspace, verb, order.inputs, origin=order.caller, refresh=order.refresh)
    store = Store(workspace.address)
    inputs = {**(past_inputs(store, order.run, verb, order.round) if order.run else {}), **order.inputs}
    with opened(workspace, name=f"{workspace.config.name}-{verb}") as run:
        return run.call(verb, refresh=order.refresh, **inputs)


def _name() -> str:
    """Return what the current flow run is called: as its caller calls it, or for its stage."""
    order = StageOrder.model_validate(flow_run.parameters.get("order") or {})
    return order.caller.name if order.caller is not None else str(flow_run.flow_name)


def stage_flow(verb: str) -> Flow[..., Result]:
    """Return the flow that runs stage `verb` alone."""

    def alone(
        config_file: ConfigFile = CONFIG_FILE,
        order: StageOrder = StageOrder(),  # noqa: B008 - immutable
        settings: Settings | None = None,
    ) -> Result | State[Result]:
        try:
            result = run_alone(verb, config_file, order, settings)
        except LazyTrainError as error:
            tell(error)
            raise
        return Completed(name=CACHED, data=result) if result.cached else result

    about = f"The stage {verb} by itself, on the inputs of a past run or on references given to it."
    alone.__doc__ = f"""{about}

    Args:
        config_file: The YAML file, where the worker can read it; relative paths in it start from its folder.
        order: On what the stage works.
        settings: Sections of the configuration, in place of the file's.
    """
    alone.__annotations__["settings"] = settings_of(verb) | None
    made: Flow[..., Any] = flow(name=verb, flow_run_name=_name, log_prints=False, persist_result=False)(alone)
    made.description = about
    return made


ingest = stage_flow("ingest")
plan = stage_flow("plan")
begin = stage_flow("begin")
score = stage_flow("score")
mix = stage_flow("mix")
select = stage_flow("select")
train = stage_flow("train")
govern = stage_flow("govern")
weigh = stage_flow("weigh")
quote = stage_flow("quote")
evaluate = stage_flow("evaluate")
judge = stage_flow("judge")
promote = stage_flow("promote")
_ALONE = (ingest, plan, begin, score, mix, select, train, govern, weigh, quote, evaluate, judge, promote)
STAGE_FLOWS = {item.name: item for item in _ALONE}
