"""Remembered hashes are those of the bytes that are there now."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from data_contracts.store.hashes import Hashes


def test_a_hash_is_remembered_across_processes_memory_and_read_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(path: Path) -> str:
        read.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr("data_contracts.store.hashes.file_sha256", counted)
    file = tmp_path / "x"
    file.write_bytes(b"one")
    expected = hashlib.sha256(b"one").hexdigest()
    for _ in range(2):
        assert Hashes(tmp_path / "memory").sha256(file) == expected
    assert len(read) == 1
    times = file.stat()
    file.write_bytes(b"two")  # same size
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # and its modification time put back
    assert Hashes(tmp_path / "memory").sha256(file) == hashlib.sha256(b"two").hexdigest()
    assert Hashes(tmp_path / "memory").sha256(file, fresh=True) == hashlib.sha256(b"two").hexdigest()
    assert len(read) == 3


def test_a_memory_that_is_no_database_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "memory").write_bytes(b"not a database at all, " * 100)
    (tmp_path / "x").write_bytes(b"one")
    assert Hashes(tmp_path / "memory").sha256(tmp_path / "x") == hashlib.sha256(b"one").hexdigest()
