"""Remembered hashes: a file is hashed again only when it may have changed.

Promises that a remembered sha256 is used only for the same path, size, modification and change time (nanoseconds) and
inode. Kept in one SQLite file under the work folder, shared by processes; losing it costs time, never correctness, so a
memory that cannot be written is skipped with a debug line. `fresh=True` always reads the bytes.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path

from data_contracts.canonical import file_sha256

_log = logging.getLogger(__name__)
_TABLE = (
    "CREATE TABLE IF NOT EXISTS hashes (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, "
    "inode INTEGER, sha256 TEXT) WITHOUT ROWID"
)


class Hashes:
    """The memory of file hashes in the SQLite file `memory`."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._link: sqlite3.Connection | None = None

    def sha256(self, path: Path, *, fresh: bool = False) -> str:
        """Return the sha256 (64 hex digits) of `path`, from memory where nothing about the file has changed."""
        path = path.resolve()
        stat = path.stat()
        key = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        with self._lock:
            if not fresh and (known := self._recall(path, key)):
                return known
            sha = file_sha256(path)
            self._remember(path, key, sha)
            return sha

    def _open(self) -> sqlite3.Connection:
        if self._link is None:
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            link = sqlite3.connect(self._memory, timeout=5, check_same_thread=False, isolation_level=None)
            link.execute("PRAGMA synchronous = OFF")
            link.execute(_TABLE)
            self._link = link
        return self._link

    def _recall(self, path: Path, key: tuple[int, ...]) -> str | None:
        try:
            row = self._open().execute(
                "SELECT sha256 FROM hashes WHERE path=? AND size=? AND mtime_ns=? AND ctime_ns=? AND inode=?",
                (str(path), *key),
            )
            found = row.fetchone()
        except (sqlite3.Error, OSError) as error:
            _log.debug("the memory of hashes %s cannot be read: %s", self._memory, error)
            return None
        return str(found[0]) if found else None

    def _remember(self, path: Path, key: tuple[int, ...], sha: str) -> None:
        try:
            self._open().execute("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?, ?)", (str(path), *key, sha))
        except (sqlite3.Error, OSError) as error:
            _log.debug("the memory of hashes %s cannot be written: %s", self._memory, error)
