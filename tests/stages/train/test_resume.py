"""Killed at any moment and run again, a segment leaves the bytes of one that was never interrupted."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from stages.train.job import Job
from stages.train.loop import run_segment
from stages.train.snapshot import Snapshots
from stages.train.stage import STAGE
from stages.workers.group import Group
from tests.conftest import ROOT
from tests.local_work import work_for
from tests.stages.train.killed import DIGESTS, config, house_of, run

ROWS = 40
FORK = multiprocessing.get_context("fork")


def snapshots(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "scratch/snapshots").glob("[0-9]*"))


def wait_for(condition, process, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        alive = process.is_alive() if hasattr(process, "is_alive") else process.poll() is None
        assert alive, "it ended before it could be killed"
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.002)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_segment_killed_several_times_inside_an_epoch_is_bit_identical(tmp_path, seed):
    expected = run(tmp_path / "house", tmp_path / "whole", 0, ROWS)
    rng, folder = np.random.default_rng(seed), tmp_path / "killed"
    for step in (4, 12):
        process = FORK.Process(target=run, args=(tmp_path / "house", folder, 0, ROWS))
        process.start()
        wait_for(lambda step=step: snapshots(folder)[-1:] >= [step], process)
        time.sleep(float(rng.uniform(0, 0.05)))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (folder / DIGESTS).exists()
        assert not (folder / "outputs").exists()
        # two to go on from, one that the older one's guard may go back to, and one whose removal the kill may have met
        assert len(snapshots(folder)) <= 4
        first = folder / "scratch/rows/curve-000000004.arrow"
        written = first.stat().st_mtime_ns
    assert run(tmp_path / "house", folder, 0, ROWS) == expected
    assert first.stat().st_mtime_ns == written  # it went on, it did not start over


def test_a_segment_killed_before_its_first_snapshot_starts_over(tmp_path):
    expected = run(tmp_path / "house", tmp_path / "whole", 0, ROWS)
    folder = tmp_path / "killed"
    process = FORK.Process(target=run, args=(tmp_path / "house", folder, 0, ROWS))
    process.start()
    wait_for((folder / "scratch/rows").is_dir, process)
    process.kill()
    process.join()
    assert run(tmp_path / "house", folder, 0, ROWS) == expected


def test_a_finished_segment_is_published_again_without_training(tmp_path):
    expected = run(tmp_path / "house", tmp_path / "work", 0, ROWS)
    shutil.rmtree(tmp_path / "work/outputs")
    result = tmp_path / "work/scratch/result.json"
    written = result.stat().st_mtime_ns
    assert run(tmp_path / "house", tmp_path / "work", 0, ROWS) == expected
    assert result.stat().st_mtime_ns == written


def test_a_cut_snapshot_is_passed_over_and_one_of_other_work_too(tmp_path):
    folder = tmp_path / "work"
    process = FORK.Process(target=run, args=(tmp_path / "house", folder, 0, ROWS))
    process.start()
    wait_for(lambda: len(snapshots(folder)) == 2, process)
    process.kill()
    process.join()
    places = sorted((folder / "scratch/snapshots").glob("[0-9]*"))
    newest = places[-1] / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    work = json.loads((places[0] / "state.json").read_text())["work"]
    assert Snapshots(folder / "scratch/snapshots", "other").latest() is None
    found = Snapshots(folder / "scratch/snapshots", work).latest()
    assert found is not None
    assert found.folder == places[0]
    expected = run(tmp_path / "house", tmp_path / "whole", 0, ROWS)
    assert run(tmp_path / "house", folder, 0, ROWS) == expected


class Silent:
    """A channel to nobody."""

    def progress(self, done, total):
        """Nobody listens."""

    def report(self, metrics):
        """Nobody listens."""


def _rank(rank: int, job: dict, meeting: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    run_segment(job, Group(rank, 2), Silent())
    torch.distributed.destroy_process_group()


def two_ranks(tmp_path: Path) -> dict[str, str]:
    """Run the segment on two forked gloo ranks without Ray, publish it, and return its outputs' digests."""
    folder = tmp_path / "two"
    work = work_for(STAGE, folder, seed=3)
    job = json.loads((tmp_path / "job.json").read_text()) | {"folder": str(work.folder)}
    ranks = [FORK.Process(target=_rank, args=(rank, job, str(tmp_path / "meeting"))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    STAGE.run(config(), house_of(tmp_path / "house", 2, ROWS).inputs(), work)
    return {name: work.artifact(name).ref.digest for name in sorted(work.opened)}


def job_of(tmp_path: Path, monkeypatch) -> None:
    """Note the job that the stage makes for two workers."""
    from stages.train import publish

    class Noted(Exception):
        pass

    def note(entry, job, **settings):
        (tmp_path / "job.json").write_text(json.dumps(job))
        raise Noted

    monkeypatch.setattr(publish, "run_workers", note)
    with pytest.raises(Noted):
        STAGE.run(config(), house_of(tmp_path / "house", 2, ROWS).inputs(), work_for(STAGE, tmp_path / "j", seed=3))
    monkeypatch.undo()
    assert Job.model_validate_json((tmp_path / "job.json").read_text()).plan.workers == 2


def spawn(tmp_path: Path, folder: Path, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.stages.train.killed", tmp_path / "house", folder, workers, ROWS]
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, stderr=(tmp_path / "stderr").open("ab"))


def step_of(chunk: Path) -> int:
    """Return the step that a chunk of rows was written at."""
    return int(chunk.stem.rpartition("-")[2])


def ray_workers(driver: int) -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process(driver).children(recursive=True)
        if "RayTrainWorker" in " ".join(process.cmdline())
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_under_ray_a_killed_driver_leaves_no_rank_behind_and_a_segment_to_go_on_with(tmp_path):
    expected = run(tmp_path / "house", tmp_path / "whole", 0, ROWS)  # one rank is one rank, with Ray or without
    folder = tmp_path / "ray"
    driver = spawn(tmp_path, folder, 1)
    wait_for(lambda: snapshots(folder)[-1:] >= [12], driver)
    ranks = ray_workers(driver.pid)
    assert len(ranks) == 1
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert not (folder / DIGESTS).exists()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive  # it would write beside the one that goes on
    assert spawn(tmp_path, folder, 1).wait(300) == 0, (tmp_path / "stderr").read_text()[-3000:]
    assert json.loads((folder / DIGESTS).read_text()) == expected


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_under_ray_a_killed_rank_fails_the_stage_as_transient_and_two_ranks_go_on(tmp_path, monkeypatch):
    job_of(tmp_path, monkeypatch)
    expected = two_ranks(tmp_path)
    folder = tmp_path / "ray"
    driver = spawn(tmp_path, folder, 2)
    wait_for(lambda: snapshots(folder)[-1:] >= [4], driver)
    ray_workers(driver.pid)[0].kill()
    assert driver.wait(300) != 0
    assert b"TransientError" in (tmp_path / "stderr").read_bytes()
    assert not (folder / "outputs").exists()
    newest, made = snapshots(folder)[-1], json.loads((folder / "scratch/progress.json").read_text())["done"]
    assert newest <= made <= newest + config().train.snapshot_steps  # no more than one interval is made again
    kept = {
        path: path.stat().st_mtime_ns for path in (folder / "scratch/rows").glob("*.arrow") if step_of(path) <= newest
    }
    assert kept
    assert spawn(tmp_path, folder, 2).wait(300) == 0, (tmp_path / "stderr").read_text()[-3000:]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # what the snapshot had was not made again
    assert json.loads((folder / DIGESTS).read_text()) == expected
