"""What was seen before: exact copies, near copies, held-out content, questions and tasks. On disk, not in memory.

Splits are read in the order holdout, validation, retention, target, pool, and a row belongs to the first split that has
it: a row of a later split with the same content, the same question (whatever its answer), a near copy of it or the same
task is a leak. Content and questions are compared in match form, so case and spacing hide nothing. Inside a split an
equal row is a duplicate of the first. The index keeps 20 to 60 bytes a row and a note of where it stood, in SQLite with
a bounded page cache.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from stages.text.normalise import match_digest
from stages.text.refusal import Refused

_CACHE_KIB = 32 * 1024


class Seen:
    """An index of what earlier rows were.

    Args:
        path: the scratch file; made anew.

    Keys of kinds: E the example, C its content in match form, Q its question, T its task, R the id that the user gave.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=OFF")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        self._db.execute(
            "CREATE TABLE seen (key BLOB PRIMARY KEY, split TEXT, place TEXT, copies INTEGER) WITHOUT ROWID"
        )
        self._db.execute("BEGIN")

    def find(self, key: bytes) -> tuple[str, str] | None:
        """Return (split, place) of the first row with `key`."""
        found: tuple[str, str] | None = self._db.execute(
            "SELECT split, place FROM seen WHERE key = ?", (key,)
        ).fetchone()
        return found

    def add(self, key: bytes, split: str, place: str) -> bool:
        """Note `key`, unless an earlier row has it; return whether it is new."""
        made = self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?, ?, 1)", (key, split, place))
        return made.rowcount == 1

    def copies(self, key: bytes) -> int:
        """Count one more row with `key`, and return how many came before it."""
        (before,) = self._db.execute("SELECT copies FROM seen WHERE key = ?", (key,)).fetchone()
        self._db.execute("UPDATE seen SET copies = ? WHERE key = ?", (before + 1, key))
        return int(before)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()


def leak(what: str, split: str, place: str) -> Refused:
    """Return the refusal of a row that an earlier split holds."""
    return Refused("leak", f"leak: {what} of {place} in the {split}, which is kept apart from this split", "")


def duplicate(place: str, similarity: float | None = None) -> Refused:
    """Return the refusal of a row that its split has already."""
    if similarity is None:
        return Refused("duplicate", f"duplicate_of {place}: the same content", "")
    return Refused("near_duplicate", f"duplicate_of {place}: {similarity:.3f} alike in word 5-grams", "")


def keys_of(question: str, answer: str) -> tuple[bytes, bytes | None]:
    """Return the keys of a row's content and of its question, None for plain text."""
    return b"C" + match_digest(question, answer), b"Q" + match_digest(question) if question else None
