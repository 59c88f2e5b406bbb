"""How an attempt ends, and what it held: signals, full folders, exhausted memory, peak memory of the process.

It imports nothing heavy. The runner uses it; a stage does not need to know.
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

from data_contracts.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, ArtifactError, BudgetError, LazyTrainError

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM}


class Ending:
    """When a signal may end the work: at once, or at the end of what is held together."""

    def __init__(self) -> None:
        self._holds = 0
        self._asked: int | None = None
        self.interrupt: Any = signal.default_int_handler
        """What ctrl-C does where nothing is held: the handler that was there before."""

    def signalled(self, number: int, frame: Any) -> None:
        """Handle a signal: raise now, or remember it while something is held."""
        self._asked = number
        if not self._holds:
            self.end_if_asked()

    def end_if_asked(self) -> None:
        """Raise what the signal that came asks for: SystemExit(143), or for ctrl-C what its handler raises.

        It stays asked for: a library may have swallowed the exception on its way.
        """
        number = self._asked
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # let the attempt be closed in peace
            raise SystemExit(EXIT_TERMINATED)
        if number == signal.SIGINT:
            self.interrupt(number, None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let a signal wait until the block has ended: what is inside happens whole, and then the end comes.

        Where one came before and the work went on all the same, the end comes first.
        """
        if not self._holds:
            self.end_if_asked()
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if not self._holds:
            self.end_if_asked()


@contextmanager
def terminated_by_signal() -> Iterator[Ending]:
    """Turn SIGTERM into SystemExit(143) inside the block, and let it and ctrl-C wait where the work is `held`.

    In a thread that is not the first no signal can be caught.
    """
    ending = Ending()
    if threading.current_thread() is not threading.main_thread():
        yield ending
        return
    before = {number: signal.signal(number, ending.signalled) for number in (signal.SIGTERM, signal.SIGINT)}
    if callable(before[signal.SIGINT]):
        ending.interrupt = before[signal.SIGINT]
    try:
        yield ending
        ending.end_if_asked()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def ended_by(error: BaseException | None) -> int | None:
    """Return the exit code of the signal that `error` came after, None where it came by itself.

    Where the server ended too, telling it of the end has failed since.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        if isinstance(error, SystemExit) and error.code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
            return int(error.code)
        if type(error).__name__ == "TerminationSignal":  # what Prefect makes of SIGTERM inside a flow
            return EXIT_TERMINATED
        seen.add(id(error))
        error = error.__context__
    return None


def unwritable(error: BaseException | None) -> bool:
    """Return whether `error` comes from a folder that is full, read-only or not ours."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            return True
        if "os error 28" in str(error):  # safetensors reports a full disk as text
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error` says that memory ran out: Python's, torch's on either device, Arrow's."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch on CPU
            return True
        error = error.__cause__ or error.__context__
    return False


def explained(error: BaseException, verb: str, places: str) -> LazyTrainError | None:
    """Return what to tell of an error of the machine, None for one that speaks for itself or is not known.

    Neither is worth trying again as it is: both are refusals.
    """
    if isinstance(error, LazyTrainError) or not isinstance(error, Exception):
        return None
    if unwritable(error):
        return ArtifactError(
            f"{places} can be written",
            str(error),
            "free space or mend permissions there, or set `store.home`; nothing was committed, run again to resume",
        )
    if out_of_memory(error):
        return BudgetError(
            f"{verb} fits the memory that this process may have",
            f"{type(error).__name__}: {str(error)[:300] or 'memory ran out'}",
            "set `budget.peak_bytes` to what there is, so that a smaller batch is planned, or give it more",
        )
    return None


def peak_bytes() -> int:
    """Return the most memory that this process has held so far (resident, bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
