"""A pipeline whose stages are deployments: the same result, the same typed errors, and a killed one is seen everywhere."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_contracts.errors import ArtifactError, ConfigError, TransientError
from flows.workspace import Workspace
from tests.command import lazytrain
from tests.flows.small_run import lay_out
from tests.infra.services import Prefect, Service

pytestmark = [pytest.mark.slow, pytest.mark.shared, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def team(prefect: Prefect, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Prefect, Path, Service]:
    """A server with our process deployments, a configuration, and a worker that polls every second."""
    folder = tmp_path_factory.mktemp("deployed")
    config = lay_out(folder, shared)
    done = lazytrain("deploy", "process", cwd=folder, **prefect.client_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    worker = prefect.worker("stages", folder / "worker", PREFECT_WORKER_QUERY_SECONDS="1")
    return prefect, config, worker


def called(config: Path, *calls: tuple[str, dict[str, Any]], stages: str = "process") -> list[Any]:
    """Make stage calls in a pipeline run, as the pipeline does."""
    from prefect import flow

    from flows.pipeline_run import opened

    @flow(name="pipeline", persist_result=False)
    def part() -> list[Any]:
        with opened(Workspace.read(config), stages=stages) as run:  # type: ignore[arg-type]
            return [run.call(verb, **inputs) for verb, inputs in calls]

    return part()


def stage_runs(client: Any, name: str) -> list[Any]:
    """Return the flow runs of a stage, oldest first."""
    from prefect.client.schemas.filters import FlowFilter

    found = client.read_flow_runs(flow_filter=FlowFilter.model_validate({"name": {"any_": [name]}}))
    return sorted(found, key=lambda run: run.created)


def test_a_stage_on_a_worker_makes_what_it_makes_in_process(team: tuple[Prefect, Path, Service]) -> None:
    server, config, _ = team
    with server.client() as client:
        made, again = called(config, ("ingest", {}), ("ingest", {}))
        (alone,) = called(config, ("ingest", {"refresh": True}), stages="in_process")
        runs = stage_runs(client, "ingest")
    assert (made.cached, again.cached, alone.cached) == (False, True, False)
    assert again.refs == made.refs
    assert {name: ref.digest for name, ref in alone.refs.items()} == {n: r.digest for n, r in made.refs.items()}
    assert alone.run != made.run
    assert [run.state.name for run in runs] == ["Completed", "Cached"]
    assert [run.name for run in runs] == ["ingest", "ingest"]
    assert all(run.parent_task_run_id for run in runs), "shown below the pipeline that asked"
    for run in runs:
        assert len(json.dumps(run.parameters)) < 10_000
        assert set(run.parameters) == {"config_file", "order", "settings"}


def test_a_typed_error_on_a_worker_is_the_same_error_here(team: tuple[Prefect, Path, Service]) -> None:
    server, config, _ = team
    with server.client() as client:
        with pytest.raises(ArtifactError) as there:
            called(config, ("judge", {}))
        with pytest.raises(ArtifactError) as here:
            called(config, ("judge", {}), stages="in_process")
        assert there.value.args == here.value.args
        assert stage_runs(client, "judge")[-1].state.is_failed()


def test_a_stage_killed_on_its_worker_is_crashed_for_all_and_goes_on_when_run_again(
    team: tuple[Prefect, Path, Service],
) -> None:
    """Crashed tasks that no page shows: the stage's run, its pipeline's run and the attempt all say how it ended."""
    server, config, worker = team
    killed = []

    def kill() -> None:
        until = time.monotonic() + 120
        while not any((config.parent / ".lazytrain" / "work").glob("*/claim-*")) and time.monotonic() < until:
            time.sleep(0.01)  # until the stage is at work
        for process in psutil.Process(worker.process.pid).children(recursive=True):
            if "prefect.engine" in process.cmdline():
                process.kill()
                killed.append(process.pid)

    values = config.read_text().replace("longest_tokens: 256", "longest_tokens: 255")
    config.write_text(values)
    thread = threading.Thread(target=kill)
    with server.client() as client:
        thread.start()
        with pytest.raises(TransientError, match="Crashed"):
            called(config, ("ingest", {}))
        thread.join()
        assert killed
        assert stage_runs(client, "ingest")[-1].state.is_crashed()
        parent = stage_runs(client, "pipeline")[-1]
        assert parent.state.is_failed()
        from data_contracts.store import Store

        store = Store(Workspace.read(config).address)
        store.reconcile()
        assert [row.status for row in store.attempts(store.runs()[0].run)] in (["FAILED"], [])
        (made,) = called(config, ("ingest", {}))
        assert not made.cached


def test_a_deployment_that_is_not_there_is_named_with_the_command_that_makes_it(
    team: tuple[Prefect, Path, Service],
) -> None:
    server, config, _ = team
    with server.client(), pytest.raises(ConfigError, match="not there") as caught:
        called(config, ("ingest", {}), stages="unknown")
    assert caught.value.remedy == "lazytrain deploy unknown"
