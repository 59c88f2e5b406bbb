"""What a flow run says of itself beside its state: which process executes it, and the typed error that ended it.

Both are labels, which Prefect's API keeps with the run: `reconcile` reads the first to close a run whose process is
gone, a pipeline reads the second to raise what its stage raised on another machine.
"""

from __future__ import annotations

import logging

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from data_contracts import errors
from data_contracts.cost import Frozen
from data_contracts.errors import LazyTrainError
from data_contracts.store.process import Process, this_process

_log = logging.getLogger(__name__)

SIGNATURE, ERROR = "lazytrain.process", "lazytrain.error"


class _Signature(Frozen):
    process: Process
    state: str
    """The RUNNING state that this process entered: a retry enters another one."""


class _Error(Frozen):
    kind: str
    promised: str
    found: str
    remedy: str


def sign() -> None:
    """Say that this process executes the current flow run, where there is one."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None and context.flow_run.state is not None:
        signature = _Signature(process=this_process(), state=str(context.flow_run.state.id))
        _label(context.flow_run, SIGNATURE, signature)


def tell(error: LazyTrainError) -> None:
    """Say why the current flow run fails; where that cannot be said, the error itself still ends the run."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        said = _Error(
            kind=type(error).__name__, promised=str(error.promised), found=str(error.found), remedy=str(error.remedy)
        )
        try:
            _label(context.flow_run, ERROR, said)
        except Exception as second:  # the first error is what the user must see
            _log.warning("the error's parts could not be kept with the flow run: %s", second)


def _label(run: FlowRun, name: str, value: Frozen) -> None:
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(run.id, {name: value.model_dump_json()})


def signed(run: FlowRun) -> Process | None:
    """Return the process that executes `run` in the state it is in; None where it has not signed yet."""
    text = run.labels.get(SIGNATURE)
    if text is None or run.state is None:
        return None
    signature = _Signature.model_validate_json(str(text))
    return signature.process if signature.state == str(run.state.id) else None


def told(run: FlowRun) -> LazyTrainError | None:
    """Return the typed error that `run` failed with; None where it failed by another."""
    text = run.labels.get(ERROR)
    if text is None:
        return None
    said = _Error.model_validate_json(str(text))
    kind = getattr(errors, said.kind, LazyTrainError)
    error: LazyTrainError = kind(said.promised, said.found, said.remedy)
    return error
