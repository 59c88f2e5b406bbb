"""Prefect's embedded server: one start at a time on one database, out of reach of this process's signals.

Every start brings the database up to date. Many at once on a cold one wait for each other until they give up; under a
file lock each takes its few seconds in turn. The server is given a port that is already bound, so no other program can
take it meanwhile, and stands in a session of its own: a ctrl-C meant for the command leaves it up, so that how the run
ended is still recorded. This process then names it by `PREFECT_API_URL`, so that Prefect's clients here need not import
the server as well. A server that the user names so is left to itself.
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

import httpx
from filelock import FileLock

from data_contracts.errors import TransientError

URL = "PREFECT_API_URL"
_END_SECONDS = 5.0


@contextmanager
def starting_server() -> Iterator[None]:
    """Start this process's embedded server, unless one is named; what stands inside is done while it starts.

    `prepare` was called before. The server answers when the block is left, and ends with this process. Raises
    `TransientError` where it ends at once or does not answer in time.
    """
    if URL in os.environ:  # as `prepare` asks: only without it is there a folder for one
        yield
        return
    with FileLock(Path(os.environ["PREFECT_HOME"]) / "start.lock"):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bound:
            bound.bind(("127.0.0.1", 0))
            url, server = f"http://127.0.0.1:{bound.getsockname()[1]}/api", _launch(bound)
        atexit.register(_stop, server)
        os.environ[URL] = url
        if "prefect.context" in sys.modules:  # it has read the environment
            sys.modules["prefect.context"].refresh_global_settings_context()
        yield
        _wait(server, url)


def _launch(bound: socket.socket) -> subprocess.Popen[bytes]:
    roles = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    return subprocess.Popen(  # noqa: S603 - a fixed command
        [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app",
         "--fd", str(bound.fileno()), "--log-level", "error", "--lifespan", "on"],
        env={**os.environ, **roles},
        pass_fds=(bound.fileno(),),
        start_new_session=True,
    )  # fmt: skip


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    limit = float(os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"])
    give_up = time.monotonic() + limit
    while True:
        ended = server.poll()
        try:
            if ended is None and httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:  # not listening yet, or too busy to answer at once
            pass
        if ended is not None or time.monotonic() > give_up:
            _stop(server)
            del os.environ[URL]
            found = f"it did not answer in {limit:g} s" if ended is None else f"it ended with exit code {ended}"
            raise TransientError(
                "Prefect's embedded server starts",
                found,
                "try again; where it stays so, see whether the disk is full, or name a server by PREFECT_API_URL",
            )
        time.sleep(0.1)
