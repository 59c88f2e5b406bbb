"""A heartbeat: tags that change while a process works, for others to watch on their own clocks.

A beat that fails is tried again at the next one: a holder that is not heard for long is taken over, and its late commit
loses. One thread an attempt; it ends with the process, whatever ends the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from data_contracts.store.tracking import Tracking

_log = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
HEARTBEAT = "lazytrain.heartbeat"


class Heartbeat:
    """Sets the tags of every place added, every `BEAT_SECONDS` from `start` to `stop`."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self._places: list[tuple[str, Callable[[], dict[str, str]]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def add(self, run: str, tags: Callable[[], dict[str, str]]) -> None:
        """Set `tags()` on `run` with every beat from now on."""
        self._places.append((run, tags))

    def start(self) -> None:
        """Beat in the background, first in `BEAT_SECONDS`."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; no beat follows once this returns, unless the server hangs."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=BEAT_SECONDS)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            for run, tags in tuple(self._places):
                try:
                    self._tracking.tag(run, tags())
                except Exception as error:  # whatever the server did, the next beat must still come
                    _log.warning("a heartbeat was not heard: %s", error)


def stamp() -> str:
    """Return what a heartbeat says: epoch seconds, for people and for other hosts."""
    return f"{time.time():.3f}"
