"""Servers that a killed command left behind: found by the command that started them, and ended.

Prefect's embedded server is a child process that a SIGKILL of its parent does not reach. Each command marks its
children by an environment variable with its own process; a child that still runs when that process is gone is an
orphan. Only children that keep their state under the same folder are looked at, and only this user's can be.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from pydantic import ValidationError

from data_contracts.store.process import Process, this_process

STARTED_BY = "LAZYTRAIN_STARTED_BY"
_END_SECONDS = 5.0


def mark() -> None:
    """Mark every child that this process starts from now on."""
    os.environ[STARTED_BY] = this_process().model_dump_json()


def end_orphans(prefect_home: Path) -> list[int]:
    """End the servers with their state in `prefect_home` whose starter is gone, and return their process ids."""
    orphans = [found for found in psutil.process_iter() if _orphan(found, str(prefect_home))]
    for orphan in orphans:
        _signal(orphan, kill=False)
    _, alive = psutil.wait_procs(orphans, timeout=_END_SECONDS)
    for orphan in alive:
        _signal(orphan, kill=True)
    return [orphan.pid for orphan in orphans]


def _orphan(found: psutil.Process, prefect_home: str) -> bool:
    try:
        environment = found.environ()
        starter = environment.get(STARTED_BY)
        if starter is None or environment.get("PREFECT_HOME") != prefect_home or not _serves(found.cmdline()):
            return False
        return Process.model_validate_json(starter).gone()
    except (psutil.Error, OSError, ValidationError):  # it ended meanwhile, or is not ours to see
        return False


def _serves(command: list[str]) -> bool:
    return any("prefect.server" in word for word in command) or {"prefect", "server", "start"} <= set(command)


def _signal(orphan: psutil.Process, *, kill: bool) -> None:
    try:
        if kill:
            orphan.kill()
        else:
            orphan.terminate()
    except psutil.NoSuchProcess:
        return
