"""How a run is closed: as what ended it, whatever else failed since."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_contracts.store import Store
from flows.calling import call_directly
from flows.pipeline_run import recorded
from flows.workspace import Workspace
from tests.flows.small_run import lay_out

pytestmark = pytest.mark.shared


class TerminationSignal(BaseException):
    """What Prefect makes of SIGTERM inside a flow, by its name."""


@pytest.mark.parametrize(
    ("before", "status"),
    [
        (SystemExit(143), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (TerminationSignal(), "KILLED"),
        (ValueError(), "FAILED"),
    ],
)
def test_a_run_is_killed_where_its_server_ended_with_it_and_could_not_be_told(
    tmp_path: Path, shared: Path, before: BaseException, status: str
) -> None:
    workspace = Workspace.read(lay_out(tmp_path, shared))
    store = Store(workspace.address)
    error = ConnectionError("the server ended first")
    error.__context__ = before
    for raised in (error, before):
        with pytest.raises(type(raised)), recorded(workspace, store, call_directly, "small"):
            raise raised
    assert [run.status for run in store.runs()] == [status, status]
