"""Faults 1, 3, 14 and 18: another home, a disk that is full or read-only, an old name, a store that was moved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_contracts.arrow import read_table
from data_contracts.errors import ArtifactError
from data_contracts.records import Request, Result
from data_contracts.store import Store
from stages import runner
from tests.conftest import ROOT
from tests.stages import toys
from tests.stages.test_runner import make, statuses
from tests.stores import blank


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find_stage", toys.find)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 2 MB; skip where this user may not."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_01_results_are_not_lost_in_a_new_container(tmp_path: Path) -> None:
    """Another home, another folder to start in, another time zone: what was finished is not done again."""
    request = make(blank(tmp_path))
    first = runner.run(request)
    path = tmp_path / "request.json"
    path.write_text(request.model_dump_json())
    (tmp_path / "other").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.stages.toys import main; main({str(path)!r})"],
        cwd=tmp_path / "other",
        env={**os.environ, "HOME": str(tmp_path / "other"), "PYTHONPATH": str(ROOT), "TZ": "Asia/Tokyo"},
        capture_output=True,
        text=True,
        check=True,
    )
    again = Result.model_validate_json(done.stdout)
    assert (again.cached, again.refs) == (True, first.refs)


def test_18_a_store_that_was_moved_is_read_and_written_where_it_is_now(tmp_path: Path) -> None:
    """Artifact paths written in one container do not bind another that mounts the same folder elsewhere."""
    first = runner.run(make(blank(tmp_path / "a")))
    shutil.move(tmp_path / "a", tmp_path / "b")
    there = blank(tmp_path / "b")
    table = read_table(Store(there).open(first.refs["selection"]) / "data.arrow")
    assert table.num_rows == 3
    assert runner.run(make(there)).run == first.run
    made = runner.run(make(there, config={"rows": 4}))
    assert Store(there).open(made.refs["selection"]).is_relative_to(tmp_path / "b")
    assert not (tmp_path / "a").exists()


def test_03_a_store_that_fills_up_while_publishing_commits_nothing(tmp_path: Path, small_disk: Path) -> None:
    """A silent write failure that ends as success: here the attempt fails, and succeeds once there is space."""
    address = blank(tmp_path).model_copy(update={"artifact_uri": str(small_disk / "artifacts")})
    (small_disk / "ballast").write_bytes(b"\0" * (1900 * 1024))
    request = make(address, config={"rows": 20000})
    with pytest.raises(ArtifactError, match="No space left on device") as caught:
        runner.run(request)
    assert str(small_disk) in caught.value.promised
    assert statuses(address) == ["FAILED"]
    assert not [path for path in (small_disk / "artifacts").rglob("*") if path.is_file()], (
        "what came across is taken back"
    )
    (small_disk / "ballast").unlink()
    result = runner.run(make(address, config={"rows": 2000}))
    assert (result.cached, result.refs["selection"].rows) == (False, 2000)


def test_03_a_read_only_artifact_store_fails_the_stage(tmp_path: Path, small_disk: Path) -> None:
    address = blank(tmp_path).model_copy(update={"artifact_uri": str(small_disk)})
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ArtifactError, match="Read-only"):
        runner.run(make(address))
    assert statuses(address) == ["FAILED"]


def test_14_a_new_selection_never_gets_an_old_result(tmp_path: Path) -> None:
    """A finished name that returns stale results: names do not enter an identity, contents do."""
    address = blank(tmp_path)
    digests = set()
    for start in (1.0, 2.0):
        made = runner.run(make(address, config={"rows": 3, "start": start}))
        folded = runner.run(Request(verb="govern", inputs={"selection": made.ref("selection")}, store=address))
        assert not folded.cached
        digests.add(made.refs["selection"].digest)
    assert len(digests) == 2
