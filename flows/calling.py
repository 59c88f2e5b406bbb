"""How a stage is called: references in, references out, in this process or on a worker of a work pool.

In this process a call is one Prefect task that hands the request to the runner. On a pool it is a run of the stage's
deployment of that name: settings, references and who asks are its parameters, its result is read from the store, and
what it raised there is raised here. A result that was committed before shows as `Cached` either way.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Completed

from data_contracts.errors import ConfigError, TransientError
from data_contracts.records import Origin, Ref, Request, Result
from data_contracts.store import Store
from flows.labels import told
from flows.order import Place, StageOrder
from flows.present import publish
from flows.workspace import Workspace
from stages.runner import run as run_stage
from stages.work import Reporter

CACHED = "Cached"
POLL_SECONDS = 1.0
REPORTER: ContextVar[Reporter | None] = ContextVar("reporter", default=None)
"""Who shows progress and notices; the command sets it, a worker leaves it unset."""


@task(task_run_name="{request.origin.name}", cache_policy=NO_CACHE, persist_result=False, log_prints=False)
def stage_call(request: Request, pipeline: str) -> Result | State[Result]:
    """Do one stage's work, or adopt its commit; show the plan, the decision and the verdict as Prefect artifacts."""
    result = run_stage(request, reporter=REPORTER.get())
    if result.refs:
        publish(pipeline, request.origin.name, result, Store(request.store))
    return Completed(name=CACHED, data=result) if result.cached else result


def call(
    workspace: Workspace,
    verb: str,
    inputs: dict[str, tuple[Ref, ...]],
    *,
    origin: Origin,
    refresh: bool = False,
    stages: Place = "in_process",
) -> Result:
    """Make one stage call and return its result.

    Args:
        workspace: the configuration; `workspace.config.slice(verb)` is what the stage reads.
        verb: the stage.
        inputs: references by input name; an empty tuple is an input that was not given.
        origin: who asks, recorded with the attempt.
        refresh: make a new attempt even where a commit exists.
        stages: where the stage runs.
    """
    if stages != "in_process":
        given = {name: refs for name, refs in inputs.items() if refs}
        order = StageOrder(inputs=given, refresh=refresh, caller=origin)
        return _call_deployment(workspace, verb, order, f"{verb}/{stages}", origin)
    answer = stage_call(workspace.request(verb, inputs, origin, refresh=refresh), workspace.config.name)
    return answer.result() if isinstance(answer, State) else answer


def call_directly(
    workspace: Workspace, verb: str, inputs: dict[str, tuple[Ref, ...]], *, origin: Origin, refresh: bool = False
) -> Result:
    """As `call`, in this process and without Prefect: for whoever crosses many settings in one process."""
    return run_stage(workspace.request(verb, inputs, origin, refresh=refresh), reporter=REPORTER.get())


def _call_deployment(workspace: Workspace, verb: str, order: StageOrder, deployment: str, origin: Origin) -> Result:
    parameters = {
        "config_file": workspace.given,
        "order": order.model_dump(mode="json", exclude_defaults=True),
        "settings": workspace.config.slice(verb),
    }
    run = run_to_its_end(deployment, parameters, origin.name)
    state = run.state
    if state is not None and state.is_completed():
        manifest = Store(workspace.address).find_attempt(str(origin.run), origin.name)
        return Result(
            stage=manifest.stage,
            identity=manifest.identity,
            run=manifest.run,
            cached=state.name == CACHED,
            refs={name: output.ref for name, output in manifest.outputs.items()},
            costs=manifest.costs,
        )
    error = told(run)
    if error is not None:
        raise error
    said = f"flow run {run.id} of {deployment} is {state.name if state else 'gone'}: {state.message if state else ''}"
    if state is not None and state.type == StateType.FAILED:
        raise RuntimeError(said)
    raise TransientError(f"the stage {origin.name} ends", said, "run again: what was committed is kept")


def run_to_its_end(deployment: str, parameters: dict[str, Any], name: str) -> FlowRun:
    """Run a deployment below the current flow run until it has ended; ended with it, where this process is ended."""
    try:
        run: Any = run_deployment(deployment, parameters=parameters, flow_run_name=name, timeout=0)
    except ObjectNotFound as error:
        raise ConfigError(
            f"the deployment {deployment} is on the Prefect server",
            "it is not there",
            f"lazytrain deploy {deployment.partition('/')[2]}",
        ) from error
    with get_client(sync_client=True) as client:
        try:
            while run.state is None or not run.state.is_final():
                time.sleep(POLL_SECONDS)
                run = client.read_flow_run(run.id)
        except BaseException:
            client.set_flow_run_state(run.id, Cancelling(message="The pipeline that asked was ended."))
            raise
    found: FlowRun = run
    return found
