"""`python -m stages`: requests are checked before anything runs, and exit codes say what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_contracts.errors import ConfigError
from data_contracts.records import Request, Result, StoreAddress
from stages import __main__ as entry
from stages import runner
from tests.conftest import ROOT
from tests.stages import toys
from tests.stages.test_runner import make
from tests.stores import blank

ADDRESS = StoreAddress(tracking_uri="sqlite:///nowhere/x.db", work_uri="nowhere")


def save(folder: Path, request: Request) -> Path:
    path = folder / "request.json"
    path.write_text(request.model_dump_json())
    return path


def test_a_committed_and_an_adopted_request_exit_0_with_the_result_on_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "find_stage", toys.find)
    path = save(tmp_path, make(blank(tmp_path)))
    for cached in (False, True):
        assert entry.main(["select", str(path)]) == 0
        assert Result.model_validate_json(capsys.readouterr().out).cached is cached


@pytest.mark.parametrize(
    ("how", "code"), [("raise", 3), ("sigkill_never", 0)], ids=["an unexpected error may pass", "success"]
)
def test_exit_codes_tell_failure_from_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, code: int
) -> None:
    monkeypatch.setattr(runner, "find_stage", toys.find)
    path = save(tmp_path, make(blank(tmp_path), knobs={"act": how}))
    assert entry.main(["select", str(path)]) == code


def test_a_refused_request_exits_2_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "find_stage", toys.find)
    path = save(tmp_path, make(blank(tmp_path), config={"rowz": 3}))
    assert entry.main(["select", str(path)]) == 2
    assert "did you mean 'rows'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"verb": "select"}', json.dumps({"verb": "select", "store": {}, "extra": 1})]
)
def test_a_file_that_holds_no_request_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "request.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        entry.read_request(path, "select")


def test_a_missing_an_oversized_and_a_misaddressed_request_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="readable"):
        entry.read_request(tmp_path / "absent.json", "select")
    path = save(tmp_path, Request(verb="select", store=ADDRESS))
    with pytest.raises(ConfigError, match="asks for select"):
        entry.read_request(path, "score")
    path.write_text(" " * (entry.LARGEST_REQUEST_BYTES + 1))
    with pytest.raises(ConfigError, match="pass references"):
        entry.read_request(path, "select")


def run(cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_unknown_stage_is_refused_with_the_nearest_name_and_without_torch(tmp_path: Path) -> None:
    path = save(tmp_path, Request(verb="scroe", store=ADDRESS))
    done = run(ROOT, "-X", "importtime", "-m", "stages", "scroe", str(path))
    assert done.returncode == 2
    assert "did you mean 'score'" in done.stderr
    assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_a_foreign_package_of_the_same_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_contracts").mkdir()
    for name in ("__init__", "errors", "records"):
        (tmp_path / "data_contracts" / f"{name}.py").write_text("")
    path = save(tmp_path, Request(verb="score", store=ADDRESS))
    script = (
        "import sys, runpy; sys.path.insert(0, sys.argv.pop(1)); import data_contracts.errors, data_contracts.records;"
        f"sys.path.insert(0, {str(tmp_path)!r}); del sys.modules['data_contracts'];"
        "runpy.run_module('stages', run_name='__main__', alter_sys=True)"
    )
    done = run(tmp_path, "-P", "-c", script, str(ROOT), "score", str(path))
    assert done.returncode == 2, done.stderr
    assert "remove the other package" in done.stderr
