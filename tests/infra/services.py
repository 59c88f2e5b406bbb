"""The services of a team, as processes of this machine, on loopback and free ports: started, awaited, ended.

Each service keeps its log in its folder and runs in a process group of its own. Nothing here is a stand-in: they are the
programs that `infra/compose.yaml` runs in containers.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from flows.environment import OFFLINE, QUIET
from tests.conftest import ROOT

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

START_SECONDS = 180.0
HOST = "127.0.0.1"
POSTGRES_USER = "nobody"


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def plain_environment(**extra: str) -> dict[str, str]:
    """Return the environment of a service: this one without any Prefect or MLflow setting, quiet, and `extra`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW", "LAZYTRAIN"))
    }
    loud = {name: value for name, value in QUIET.items() if "LOGGING" not in name}
    return {**kept, **loud, **OFFLINE, "PYTHONPATH": str(ROOT), **extra}


@dataclass
class Service:
    """A running program."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        """What it wrote so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def end(self, *numbers: int, patience: float = 20.0) -> None:
        """Send signals to its process group, one after the other, until it has ended."""
        for number in (*numbers, signal.SIGKILL):
            if self.process.poll() is not None:
                break
            os.killpg(self.process.pid, number)
            try:
                self.process.wait(timeout=patience)
            except subprocess.TimeoutExpired:
                continue
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # whoever is left of its group
        except ProcessLookupError:
            return


def start(
    name: str,
    command: list[str],
    folder: Path,
    environment: Mapping[str, str],
    ready: Callable[[], bool] | None = None,
    user: str | None = None,
) -> Service:
    """Start a program in `folder` and wait until it is ready."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdout=output, stderr=output, start_new_session=True, user=user
        )
    service = Service(name, process, log)
    until = time.monotonic() + START_SECONDS
    while ready is not None and not ready():
        if process.poll() is not None or time.monotonic() > until:
            service.end()
            raise AssertionError(f"{name} did not start:\n{service.said[-4000:]}")
        time.sleep(0.2)
    return service


def answers(url: str, code: int = 200, auth: tuple[str, str] | None = None) -> Callable[[], bool]:
    """Return a test for whether a page answers with `code`."""

    def ask() -> bool:
        try:
            return httpx.get(url, timeout=2, auth=auth).status_code == code
        except httpx.HTTPError:
            return False

    return ask


@dataclass
class Prefect:
    """A Prefect server and how to reach it."""

    service: Service
    url: str
    folder: Path
    auth: str = ""
    workers: list[Service] = field(default_factory=list)

    @property
    def client_environment(self) -> dict[str, str]:
        """What a client of this server sets."""
        extra = {"PREFECT_API_AUTH_STRING": self.auth} if self.auth else {}
        return {"PREFECT_API_URL": self.url, "PREFECT_HOME": str(self.folder / "client"), **extra}

    @contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        """Make this server the one of this process, and yield a client of it."""
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

        settings = {PREFECT_API_URL: self.url, PREFECT_API_AUTH_STRING: self.auth or None}
        with temporary_settings(settings), get_client(sync_client=True) as client:
            yield client

    def worker(self, name: str, folder: Path, pool: str = "lazytrain-process", **extra: str) -> Service:
        """Start a process worker in `folder`."""
        environment = plain_environment(**{**self.client_environment, **extra})
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", name]
        made = start(name, command, folder, environment, ready=None)
        self.workers.append(made)
        return made


@contextmanager
def prefect_server(folder: Path, *, auth: str = "", **extra: str) -> Iterator[Prefect]:
    """Run a Prefect server with its state in `folder`, where `extra` names no database."""
    port = free_port()
    environment = plain_environment(PREFECT_HOME=str(folder / "server"), **extra)
    if auth:
        environment["PREFECT_SERVER_API_AUTH_STRING"] = auth
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
    url = f"http://{HOST}:{port}/api"
    credentials = (auth.partition(":")[0], auth.partition(":")[2]) if auth else None
    service = start("prefect", command, folder, environment, answers(f"{url}/admin/version", auth=credentials))
    made = Prefect(service, url, folder, auth)
    try:
        yield made
    finally:
        for worker in made.workers:
            worker.end(signal.SIGTERM, patience=5)
        service.end(signal.SIGINT, patience=10)


def postgres_programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, None where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) if Path("/usr/lib/postgresql").is_dir() else []
    if found:
        return found[-1].parent
    program = shutil.which("initdb")
    return Path(program).resolve().parent if program else None


@contextmanager
def postgres(password: str) -> Iterator[dict[str, str]]:
    """Run PostgreSQL, with a team's databases, as a user without rights; yield how libpq opens it.

    It has a folder of its own: pytest closes those that it makes to other users, at each start.
    """
    programs = postgres_programs()
    assert programs is not None
    user = POSTGRES_USER if os.geteuid() == 0 else None
    place = Path(tempfile.mkdtemp(prefix="lt-postgres-", dir="/tmp"))
    secret = place / "password"
    secret.write_text(password)
    if user:
        for path in (place, secret):
            os.chown(path, pwd.getpwnam(user).pw_uid, -1)
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(place)}
    data, port = place / "data", free_port()
    subprocess.run(
        [str(programs / "initdb"), "-D", str(data), "-U", "lazytrain", "-E", "UTF8", "-A", "scram-sha-256", "--pwfile", str(secret)],
        check=True, capture_output=True, user=user, env=environment, cwd=place,
    )  # fmt: skip
    secret.unlink()
    command = [str(programs / "postgres"), "-D", str(data), "-h", HOST, "-p", str(port), "-k", str(place),
               "-c", "fsync=off", "-c", "max_connections=200"]  # fmt: skip
    probe = [str(programs / "pg_isready"), "-q", "-h", HOST, "-p", str(port)]
    service = start(
        "postgres", command, place, environment, lambda: subprocess.run(probe, check=False).returncode == 0, user
    )
    try:
        login = {"PGHOST": HOST, "PGPORT": str(port), "PGUSER": "lazytrain", "PGPASSWORD": password}
        made = ["-c", "CREATE DATABASE prefect", "-f", str(ROOT / "infra" / "postgres" / "databases.sql")]
        command = [str(programs / "psql"), "-q", "-v", "ON_ERROR_STOP=1", "-d", "postgres", *made]
        subprocess.run(command, env={**environment, **login}, check=True, capture_output=True)
        yield login
    finally:
        service.end(signal.SIGINT)
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def mlflow_server(folder: Path, login: Mapping[str, str], password: str) -> Iterator[str]:
    """Run an MLflow server on PostgreSQL with proxied artifacts and basic authentication; yield its address.

    Args:
        folder: of its artifacts and its log.
        login: the variables by which libpq finds and opens the databases `mlflow` and `mlflow_auth`.
        password: of the user `admin`.
    """
    port = free_port()
    environment = plain_environment(
        **login,
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
        MLFLOW_AUTH_CONFIG_PATH=str(ROOT / "infra" / "mlflow_auth.ini"),
        MLFLOW_AUTH_ADMIN_PASSWORD=password,
        MLFLOW_FLASK_SERVER_SECRET_KEY="for-this-test-only",
    )
    command = [str(Path(sys.executable).with_name("mlflow")), "server", "--backend-store-uri", "postgresql+psycopg2:///mlflow",
               "--artifacts-destination", str(folder / "artifacts"), "--serve-artifacts", "--app-name", "basic-auth",
               "--host", HOST, "--port", str(port), "--workers", "1"]  # fmt: skip
    url = f"http://{HOST}:{port}"
    service = start("mlflow", command, folder, environment, answers(f"{url}/health"))
    try:
        yield url
    finally:
        service.end(signal.SIGTERM)


@contextmanager
def ray_head(folder: Path, token: str) -> Iterator[str]:
    """Run a Ray head that takes only who has the token; yield its address."""
    port = free_port()
    place = Path(tempfile.mkdtemp(prefix="lt-ray-", dir="/tmp"))  # sockets need a short path
    environment = plain_environment(RAY_AUTH_TOKEN=token, RAY_TMPDIR=str(place))
    environment |= {"RAY_AUTH_MODE": "token", "PYTHONSAFEPATH": "1"}
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", str(port),
               "--node-ip-address", HOST, "--num-cpus", "2", "--include-dashboard", "false", "--disable-usage-stats",
               "--temp-dir", str(place), "--object-store-memory", str(200 * 2**20)]  # fmt: skip
    address = f"{HOST}:{port}"
    probe = [str(Path(sys.executable).with_name("ray")), "health-check", "--address", address]

    def healthy() -> bool:
        return subprocess.run(probe, env=environment, capture_output=True, check=False).returncode == 0

    service = start("ray", command, folder, environment, healthy)
    try:
        yield address
    finally:
        service.end(signal.SIGTERM)
        shutil.rmtree(place, ignore_errors=True)
