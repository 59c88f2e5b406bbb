"""Prefect's embedded server: one start at a time on one database.

Every start brings the database up to date. Many at once on a cold one wait for each other until they give up; under a
file lock each takes its few seconds in turn. A server that `PREFECT_API_URL` names is left to itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock


def start_server() -> None:
    """Start this process's embedded server, unless one is named; it ends with this process."""
    if "PREFECT_API_URL" in os.environ:  # as `prepare` asks: only without it is there a folder for a server
        return
    from prefect.server.api.server import SubprocessASGIServer

    with FileLock(Path(os.environ["PREFECT_HOME"]) / "start.lock"):
        SubprocessASGIServer().start()
