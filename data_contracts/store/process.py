"""Which process: enough to tell, on the same host, whether the one that held something is still there.

A pid alone is reused, and containers share host names and pids; so a process is host, boot and pid namespace, pid and
start time. Another host's process cannot be looked up: its heartbeat must be watched instead.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import psutil

from data_contracts.cost import Frozen

_SAME_START_SECONDS = 1.0


class Process(Frozen):
    """One process of one machine."""

    host: str
    place: str
    """Boot and pid namespace: where `pid` means something."""
    pid: int
    started: float
    """Epoch seconds."""

    def gone(self) -> bool:
        """Return whether the process is certain to have ended; False for one that cannot be seen from here."""
        if (self.host, self.place) != _here():
            return False
        try:
            found = psutil.Process(self.pid)
            return (
                abs(found.create_time() - self.started) > _SAME_START_SECONDS or found.status() == psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


@functools.cache
def _here() -> tuple[str, str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return platform.node(), f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: one pid namespace a host
        return platform.node(), ""


def this_process() -> Process:
    """Return the calling process."""
    host, place = _here()
    return Process(host=host, place=place, pid=os.getpid(), started=psutil.Process().create_time())
