"""Prefect's embedded server: one start at a time on one database, out of reach of this process's signals.

Every start brings the database up to date. Many at once on a cold one wait for each other until they give up; under a
file lock each takes its few seconds in turn. The server is given a port that is already bound, so no other program can
take it meanwhile, and stands in a session of its own: a ctrl-C meant for the command leaves it up, so that how the run
ended is still recorded. A server that `PREFECT_API_URL` names is left to itself.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from filelock import FileLock

from data_contracts.errors import TransientError

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer


@contextmanager
def starting_server() -> Iterator[None]:
    """Start this process's embedded server, unless one is named; what stands inside is done while it starts.

    It answers when the block is left, and ends with this process. Raises `TransientError` where it ends at once or does
    not answer in time.
    """
    if "PREFECT_API_URL" in os.environ or _running():  # as `prepare` asks: only without it is there a folder for one
        yield
        return
    with FileLock(Path(os.environ["PREFECT_HOME"]) / "start.lock"):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bound:
            bound.bind(("127.0.0.1", 0))
            port, process = bound.getsockname()[1], _launch(bound)
        from prefect.server.api.server import SubprocessASGIServer  # two seconds, after the launch

        server = SubprocessASGIServer()  # the one that Prefect's clients of this process ask for
        server.port, server.server_process, server.running = port, process, True
        atexit.register(server.stop)
        yield
        _wait(server)


def _running() -> bool:
    module = sys.modules.get("prefect.server.api.server")
    return module is not None and bool(module.SubprocessASGIServer().running)


def _launch(bound: socket.socket) -> subprocess.Popen[bytes]:
    from prefect.settings import get_current_settings

    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    roles = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    return subprocess.Popen(  # noqa: S603 - a fixed command
        [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app",
         "--fd", str(bound.fileno()), "--log-level", "error", "--lifespan", "on"],
        env={**os.environ, **roles, **settings},
        pass_fds=(bound.fileno(),),
        start_new_session=True,
    )  # fmt: skip


def _wait(server: SubprocessASGIServer) -> None:
    from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS

    limit = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
    give_up = time.monotonic() + limit
    while True:
        ended = server.server_process.poll() if server.server_process else None
        try:
            if ended is None and httpx.get(f"{server.api_url}/health", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:  # not listening yet, or too busy to answer at once
            pass
        if ended is not None or time.monotonic() > give_up:
            server.stop()
            found = f"it did not answer in {limit} s" if ended is None else f"it ended with exit code {ended}"
            raise TransientError(
                "Prefect's embedded server starts",
                found,
                "try again; where it stays so, see whether the disk is full, or name a server by PREFECT_API_URL",
            )
        time.sleep(0.1)
