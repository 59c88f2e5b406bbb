"""`lazytrain resume` refuses what it cannot go on with, and says why. (Real resumes: tests/faults/test_soak.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from data_contracts.config import Config
from data_contracts.errors import ArtifactError, ConfigError
from data_contracts.store import Store
from flows.command.resume import resumable
from flows.workspace import Workspace
from tests.command import lazytrain
from tests.stores import blank

VALUES = {"name": "small", "model": {"path": "model"}, "data": {"pool": "pool.jsonl", "target": "target.jsonl"}}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A configuration file and the tables of its store, made in advance."""
    (tmp_path / "lazytrain.yaml").write_text(yaml.safe_dump(VALUES))
    made = blank(tmp_path / "made")
    home = tmp_path / ".lazytrain"
    home.mkdir()
    Path(made.tracking_uri.removeprefix("sqlite:///")).rename(home / "mlflow.db")
    return Workspace.read(tmp_path / "lazytrain.yaml")


def record(workspace: Workspace, status: str | None, name: str = "small") -> str:
    store = Store(workspace.address)
    run = store.open_run(name, workspace.config.model_dump(mode="json"))
    if status is not None:
        store.close_run(run, status)  # type: ignore[arg-type]
    return run


def test_a_failed_and_a_killed_run_can_be_resumed_by_the_start_of_their_ids(workspace: Workspace) -> None:
    for status in ("FAILED", "KILLED"):
        run = record(workspace, status)
        assert resumable(workspace, run[:12]) == run


def test_an_unknown_a_finished_a_live_and_a_one_stage_run_are_refused(workspace: Workspace) -> None:
    with pytest.raises(ArtifactError, match="0 runs begin with"):
        resumable(workspace, "abc")
    with pytest.raises(ConfigError, match="finished"):
        resumable(workspace, record(workspace, "FINISHED"))
    with pytest.raises(ConfigError, match="at work"):
        resumable(workspace, record(workspace, None))
    with pytest.raises(ConfigError, match="one stage alone"):
        resumable(workspace, record(workspace, "FAILED", name="small-score"))


def test_a_configuration_file_that_moved_is_asked_for(workspace: Workspace, tmp_path: Path) -> None:
    done = lazytrain("resume", "abc", "--config", "moved.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no file moved.yaml" in done.stderr
    assert "--config FILE" in done.stderr


def test_the_recorded_configuration_counts_and_the_store_of_the_file(workspace: Workspace, tmp_path: Path) -> None:
    recorded = Config(**{**VALUES, "seed": 7, "store": {"home": "elsewhere"}}).model_dump(mode="json")  # type: ignore[arg-type]
    found = workspace.recorded(recorded)
    assert found.config.seed == 7
    assert found.home == tmp_path / ".lazytrain"
    with pytest.raises(ConfigError, match="recorded"):
        workspace.recorded({**recorded, "an_old_section": {}})


def test_what_a_run_resumes_is_remembered(workspace: Workspace) -> None:
    past, store = record(workspace, "KILLED"), Store(workspace.address)
    run = store.open_run("small", {}, resumes=past)
    store.close_run(run, "FINISHED")
    rows = {row.run: row.resumes for row in store.runs()}
    assert rows == {run: past, past: ""}


def test_a_finished_run_goes_on_under_a_limit_that_is_valid_and_may_be_raised(workspace: Workspace) -> None:
    run = record(workspace, "FINISHED")
    assert resumable(workspace, run, {"budget": {"flops": 5e15}}) == run
    with pytest.raises(ConfigError, match=r"select\.fraction"):
        resumable(workspace, run, {"select": {"fraction": 1.0}})
    with pytest.raises(ConfigError, match="limits nothing"):
        resumable(workspace, run, {"budget": {"money": 5}})
