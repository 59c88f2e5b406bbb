"""A team's services started together, as `infra/compose.yaml` starts them, and the real pipeline run on them.

PostgreSQL, a Prefect server and an MLflow server on it with authentication, a Ray head with a token, a process worker.
Eight pipelines meet on the cold store; a scheduled one then adopts what they committed; a stage is run again through the
API that Prefect's pages use. An in-process run on SQLite is the oracle of every digest.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from data_contracts.store import AttemptRow, Store
from flows.workspace import Workspace
from stages.stage import VERBS
from tests.command import lazytrain
from tests.conftest import ROOT
from tests.flows.small_run import Runs, lay_out
from tests.infra import services
from tests.infra.services import Prefect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.shared,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(services.postgres_programs() is None, reason="needs PostgreSQL: apt-get install postgresql"),
]
PIPELINES = 8


@dataclass
class Team:
    """The running stack, a configuration that names it, and its secrets."""

    folder: Path
    config: Path
    prefect: Prefect
    mlflow: str
    ray: str
    account: dict[str, str]
    hidden: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What a member's shell, or a worker, sets."""
        return {**self.prefect.client_environment, **self.account, "RAY_ADDRESS": self.ray, "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self.hidden["ray"]}  # fmt: skip

    @cached_property
    def store(self) -> Store:
        """The team's store."""
        return Store(Workspace.read(self.config).address)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("team")
    hidden = {name: secrets.token_hex(16) for name in ("postgres", "prefect", "admin", "account", "ray")}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        login = stack.enter_context(services.postgres(hidden["postgres"]))
        server = stack.enter_context(
            services.prefect_server(
                folder / "prefect",
                auth=f"team:{hidden['prefect']}",
                PREFECT_SERVER_DATABASE_DRIVER="postgresql+asyncpg",
                PREFECT_SERVER_DATABASE_HOST=login["PGHOST"],
                PREFECT_SERVER_DATABASE_PORT=login["PGPORT"],
                PREFECT_SERVER_DATABASE_NAME="prefect",
                PREFECT_SERVER_DATABASE_USER=login["PGUSER"],
                PREFECT_SERVER_DATABASE_PASSWORD=login["PGPASSWORD"],
                PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE="prefect.server.concurrency.lease_storage.filesystem",
            )
        )
        mlflow = stack.enter_context(services.mlflow_server(folder / "mlflow", login, hidden["admin"]))
        ray = stack.enter_context(services.ray_head(folder / "ray", hidden["ray"]))
        member = {"username": "member", "password": hidden["account"]}
        asked = httpx.post(
            f"{mlflow}/api/2.0/mlflow/users/create", json=member, auth=("admin", hidden["admin"]), timeout=30
        )
        assert asked.status_code == 200, asked.text
        credentials = {"MLFLOW_TRACKING_USERNAME": "member", "MLFLOW_TRACKING_PASSWORD": hidden["account"]}
        for name, value in credentials.items():
            patch.setenv(name, value)  # this process reads the store as a member does
        (folder / "data").mkdir()
        config = lay_out(
            folder / "data", shared, store={"tracking_uri": mlflow, "work_uri": str(folder / "data" / "work")}
        )
        yield Team(folder, config, server, mlflow, ray, credentials, hidden)


def made(rows: list[AttemptRow]) -> dict[str, str]:
    """Return, of what was done in a pipeline run, call and output → digest; what promotion did is the registry's."""
    return {f"{row.name}.{name}": ref.digest for row in rows for name, ref in row.refs.items() if name != "promotion"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> dict[str, str]:
    """Return the digests of an in-process run on SQLite."""
    folder = tmp_path_factory.mktemp("alone")
    lay_out(folder, shared)
    runs = Runs(folder)
    runs.run("run")
    return made(runs.attempts())


def test_whoever_has_no_password_is_refused_everywhere(team: Team) -> None:
    assert httpx.post(f"{team.prefect.url}/flow_runs/filter", json={}).status_code == 401
    assert httpx.get(f"{team.prefect.url}/admin/version", auth=("team", "wrong")).status_code == 401
    for auth in (None, ("admin", "password1234"), ("member", "wrong")):
        asked = httpx.post(f"{team.mlflow}/api/2.0/mlflow/experiments/search", json={"max_results": 1}, auth=auth)
        assert asked.status_code == 401
    done = lazytrain(
        "run", str(team.config), cwd=team.folder, **team.prefect.client_environment, MLFLOW_TRACKING_PASSWORD=""
    )
    assert done.returncode != 0
    assert "401" in done.stderr or "credentials" in done.stderr.lower()
    code = "import ray; ray.init(log_to_driver=False)"
    environment = services.plain_environment(RAY_ADDRESS=team.ray, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="wrong")
    joined = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert joined.returncode != 0


def test_eight_pipelines_at_once_on_the_cold_store_all_end_and_commit_each_stage_once(
    team: Team, alone: dict[str, str]
) -> None:
    began = time.monotonic()
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "flows.command.app", "run", str(team.config)],
            cwd=team.folder,
            env={**services.plain_environment(**team.environment), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(PIPELINES)
    ]
    try:
        told = [child.communicate(timeout=600)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    print(f"{PIPELINES} pipelines in {time.monotonic() - began:.0f} s")
    failed = {child.returncode: text[-3000:] for child, text in zip(children, told, strict=True) if child.returncode}
    assert not failed, "\n".join(f"exit {code}: {text}" for code, text in failed.items())
    runs = team.store.runs()
    assert [run.status for run in runs] == ["FINISHED"] * PIPELINES
    committed: dict[str, set[str]] = {}
    for run in runs:
        rows = team.store.attempts(run.run)
        assert {row.stage for row in rows} == set(VERBS) - {"mix", "weigh", "quote"}, "no lost record"
        assert {row.status for row in rows} == {"FINISHED"}
        assert made(rows) == alone
        for row in rows:
            if not row.cached and row.stage != "promote":
                committed.setdefault(row.identity, set()).add(row.run)
    assert len(committed) == len({key.partition(".")[0] for key in alone}), (
        "each stage but promotion, which is an effect"
    )
    assert {len(attempts) for attempts in committed.values()} == {1}, "no stage committed twice"


def ended(team: Team, client: Any, run: Any, seconds: float = 300.0) -> Any:
    """Return a flow run when it has ended."""
    until = time.monotonic() + seconds
    while not (found := client.read_flow_run(run)).state.is_final():
        assert time.monotonic() < until, found.state
        time.sleep(0.5)
    return found


def test_the_pipeline_runs_from_a_worker_on_its_schedule_and_a_stage_again_through_the_pages_api(
    team: Team, alone: dict[str, str]
) -> None:
    from prefect.client.schemas.filters import DeploymentFilter

    options = ("--config", str(team.config), "--cron", "* * * * *")
    done = lazytrain("deploy", "process", *options, cwd=team.folder, **team.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    team.prefect.worker(
        "team",
        team.folder / "worker",
        PREFECT_WORKER_QUERY_SECONDS="1",
        **team.environment,
    )
    with team.prefect.client() as client:
        deployment = client.read_deployment_by_name("pipeline/process")
        of_it = DeploymentFilter.model_validate({"id": {"any_": [deployment.id]}})
        until = time.monotonic() + 180
        while not (begun := [r for r in client.read_flow_runs(deployment_filter=of_it) if r.start_time]):
            assert time.monotonic() < until
            time.sleep(0.5)
        client.pause_deployment(deployment.id)
        scheduled = ended(team, client, begun[0].id)
        assert scheduled.state.is_completed(), scheduled.state.message
        assert scheduled.auto_scheduled
        run = team.store.runs()[0]
        rows = team.store.attempts(run.run)
        assert made(rows) == alone
        assert all(row.cached for row in rows if row.stage != "promote")

        # What Prefect's pages send for a custom run: the form's values, with the team's password.
        train = client.read_deployment_by_name("train/process")
        for workers in (0, 1):  # in the worker's process, and on the team's Ray cluster
            settings = {"train": {"learning_rate": 1e-3, "evaluations": 2, "workers": workers}}
            asked = httpx.post(
                f"{team.prefect.url}/deployments/{train.id}/create_flow_run",
                json={
                    "parameters": {"order": {"run": run.run, "refresh": True}, "settings": settings},
                    "state": {"type": "SCHEDULED"},
                },
                auth=("team", team.hidden["prefect"]),
                timeout=30,
            )
            assert asked.status_code == 201, asked.text
            again = ended(team, client, asked.json()["id"])
            assert again.state.is_completed(), again.state.message
            assert again.run_count == 1
            newest = team.store.runs()[0]
            assert newest.name == "small-train"
            (row,) = team.store.attempts(newest.run)
            assert not row.cached, "a new attempt, with its own history"
            found = {f"train-round-1.{name}": ref.digest for name, ref in row.refs.items()}
            assert found["train-round-1.curve"] == alone["train-round-1.curve"]
            assert workers or found.items() <= alone.items()
    assert team.store.attempts(run.run) == rows, "the past run is as it was"


def test_no_secret_is_in_what_the_services_keep_or_say(team: Team) -> None:
    """After all that ran above: parameters, logs, artifacts, pools, payloads, log files, command lines."""
    kept: dict[str, str] = {}
    auth = ("team", team.hidden["prefect"])
    for kind in (
        "flow_runs",
        "task_runs",
        "logs",
        "artifacts",
        "deployments",
        "work_pools",
        "block_documents",
        "events",
    ):
        offset, pages = 0, []
        while True:
            body = {"filter": {}} if kind == "events" else {"limit": 200, "offset": offset}
            answer = httpx.post(
                f"{team.prefect.url}/{kind}/filter", json=body, auth=auth, timeout=30
            ).raise_for_status()
            pages.append(answer.text)
            if kind == "events" or len(answer.json()) < 200:
                break
            offset += 200
        kept[kind] = "".join(pages)
    assert len(json.loads(kept["flow_runs"])) > PIPELINES
    for file in team.folder.rglob("*"):
        below = file.relative_to(team.folder).parts[0]
        if file.is_file() and below in {"prefect", "mlflow", "ray", "worker", "data"} and "client" not in file.parts:
            kept[str(file)] = file.read_bytes().decode("utf-8", errors="replace")
    assert any(path.endswith("manifest.json") for path in kept)
    for process in psutil.Process(os.getpid()).children(recursive=True):
        kept[f"command line of {process.pid}"] = " ".join(process.cmdline())
    for run in team.store.runs():
        kept[f"tracking {run.run}"] = json.dumps([row.model_dump(mode="json") for row in team.store.attempts(run.run)])
    for name, secret in team.hidden.items():
        encoded = base64.b64encode(f"team:{secret}".encode()).decode()
        found = [place for place, text in kept.items() if secret in text or encoded in text]
        assert not found, f"the password of {name} is in {found}"


def test_the_stack_is_what_compose_starts() -> None:
    """The options under test are the ones that a team's containers get."""
    import yaml

    file = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())["services"]
    assert {"--app-name", "basic-auth", "--serve-artifacts", "postgresql+psycopg2:///mlflow"} <= set(
        file["mlflow"]["command"]
    )
    named = set(file["prefect"]["environment"])
    assert {"PREFECT_SERVER_DATABASE_HOST", "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"} <= named
    assert shutil.which("ray", path=str(Path(sys.executable).parent))
