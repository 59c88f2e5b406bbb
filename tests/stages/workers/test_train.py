"""Running a function on ranks: here without ray, and what a rank's failure becomes. (Real Ray runs: test_resume.)"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from data_contracts.errors import BudgetError, TransientError
from data_contracts.records import OUTSIDE_FILE
from stages.workers import cluster, train
from stages.workers.group import Group
from stages.workers.train import FAILURE, PROGRESS, run_workers
from tests.conftest import ROOT

ENTRY = "tests.stages.workers.test_train:entry"
heard: list[tuple] = []


def entry(job, group, channel):
    """Do what the job says."""
    if job.get("raise"):
        raise BudgetError("a", "b", "c")
    channel.progress(1, 2)
    channel.report({"loss": 1.0})
    heard.append((job, group))


def test_without_workers_the_function_runs_here_and_typed_errors_pass(tmp_path):
    heard.clear()
    steps = []
    settings = {"workers": 0, "device": "cpu", "folder": tmp_path, "progress": lambda *step: steps.append(step)}
    run_workers(ENTRY, {"a": 1}, **settings)
    assert heard == [({"a": 1}, Group(0, 1, "cpu"))]
    assert steps == [(1, 2)]
    with pytest.raises(BudgetError):
        run_workers(ENTRY, {"raise": True}, **settings)


def test_without_workers_ray_is_not_imported():
    code = (
        "import sys, pathlib\n"
        "from stages.workers.train import run_workers\n"
        "run_workers('builtins:print', {}, workers=0, device='cpu', folder=pathlib.Path('.'), progress=print)\n"
        "assert 'ray' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def note(folder, kind, *parts):
    (folder / FAILURE).write_text(json.dumps({"kind": kind, "parts": list(parts)}))


def test_a_ranks_typed_error_comes_back_as_itself(tmp_path):
    note(tmp_path, "BudgetError", "promised", "found", "remedy")
    error = train._failure(tmp_path, RuntimeError("group failed"))
    assert isinstance(error, BudgetError)
    assert (error.promised, error.found, error.remedy) == ("promised", "found", "remedy")


def test_a_ranks_bug_comes_back_with_its_traceback(tmp_path):
    note(tmp_path, "", "Traceback: KeyError: 'x'")
    error = train._failure(tmp_path, RuntimeError("group failed"))
    assert isinstance(error, RuntimeError)
    assert "KeyError: 'x'" in str(error)


@pytest.mark.parametrize("told", [None, "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:123"])
def test_a_lost_rank_is_worth_trying_again(tmp_path, told):
    if told:
        note(tmp_path, "", told)  # what the rank that lost its partner wrote
    error = train._failure(tmp_path, RuntimeError("worker died"))
    assert isinstance(error, TransientError)
    assert error.exit_code == 3


@pytest.mark.parametrize(
    ("cpus", "workers", "expected"),
    [([2], 1, 2), ([2], 2, 1), ([2], 4, 1), ([16, 16], 4, 8), ([0, 64, 8], 2, 8), ([], 2, 1)],
)
def test_every_rank_gets_cpus_that_its_node_has(cpus, workers, expected):
    nodes = [{"Alive": True, "Resources": {"CPU": float(count)} if count else {}} for count in cpus]
    nodes.append({"Alive": False, "Resources": {"CPU": 1.0}})
    assert cluster.cpus_a_worker(nodes, workers) == expected


def test_rays_folder_is_short_and_a_killed_attempts_is_removed(tmp_path):
    first = cluster.short_folder(tmp_path)
    assert len(str(first)) <= cluster.LONGEST_ROOT
    (first / "left").touch()
    second = cluster.short_folder(tmp_path)
    assert not first.exists()
    assert second.is_dir()
    assert (tmp_path / OUTSIDE_FILE).read_text() == str(second)
    second.rmdir()


def test_progress_written_by_a_rank_is_passed_on(tmp_path):
    path, steps = tmp_path / PROGRESS, []
    with train._watched(path, lambda *step: steps.append(step)):
        train._write(path, {"done": 3, "total": 9})
        time.sleep(2 * train.POLL_SECONDS)
        train._write(path, {"done": 9, "total": 9})
    assert steps == [(3, 9), (9, 9)]


def test_a_ray_that_does_not_start_may_be_tried_again_and_leaves_no_folder(tmp_path, monkeypatch):
    import ray

    def failing(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", failing)
    with pytest.raises(TransientError, match="timed out during startup"), cluster.cluster(2, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
