"""Folders that may go: how large they are, how long nothing changed in them, and removing one whole.

Others may be at work in any of them, so a file that vanishes while it is looked at is no error.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from data_contracts.records import OUTSIDE_FILE, OUTSIDE_PREFIX


def size_of(place: Path) -> int:
    """Return the bytes of all files below `place`."""
    return sum(stat.st_size for stat in _stats(place))


def untouched_seconds(place: Path) -> float:
    """Return for how long no file or folder at or below `place` has changed."""
    return time.time() - max((stat.st_mtime for stat in _stats(place)), default=0.0)


def _stats(place: Path) -> Iterator[os.stat_result]:
    for path in (place, *_below(place)):
        try:
            yield path.lstat()
        except FileNotFoundError:
            continue


def _below(place: Path) -> Iterator[Path]:
    """Yield what lies below `place`; unlike `Path.rglob`, `os.walk` passes over a folder that goes meanwhile."""
    for folder, folders, files in os.walk(place):
        yield from (Path(folder, name) for name in (*folders, *files))


def discard(place: Path) -> None:
    """Remove a work folder, and the temporary folder elsewhere that its scratch names."""
    for note in _below(place):
        if (note.parent.name, note.name) == ("scratch", OUTSIDE_FILE):
            with suppress(FileNotFoundError):
                outside = Path(note.read_text(encoding="utf-8"))
                if outside.name.startswith(OUTSIDE_PREFIX) and not outside.is_symlink():
                    shutil.rmtree(outside, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
