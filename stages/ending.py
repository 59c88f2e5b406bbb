"""How an attempt ends, and what it held: signals, folders that cannot be written, peak memory of the process.

Of the standard library alone. The runner uses it; a stage does not need to know.
"""

from __future__ import annotations

import errno
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from data_contracts.errors import EXIT_TERMINATED

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM}


@contextmanager
def terminated_by_signal() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143) inside the block; in a thread that is not the first it cannot be caught."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # let the attempt be closed in peace
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def unwritable(error: BaseException | None) -> bool:
    """Return whether `error` comes from a folder that is full, read-only or not ours."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            return True
        if "os error 28" in str(error):  # safetensors reports a full disk as text
            return True
        error = error.__cause__ or error.__context__
    return False


def peak_bytes() -> int:
    """Return the most memory that this process has held so far (resident, bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
