"""Tasks done by a crew of real Ray workers: order, typed errors, and how often a lost worker is replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_contracts.errors import InputError, TransientError
from stages.workers.bulk import MOST_LOST, Crew, crew
from stages.workers.cluster import cluster

ENTRY = "tests.stages.workers.test_bulk:open_worker"


def open_worker(job: dict[str, Any], resources: ExitStack) -> tuple[str, Callable[[Any], Any]]:
    """Note that this was opened; tasks are (what, number)."""
    (Path(job["place"]) / f"opened-{os.getpid()}").touch()
    if job.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)

    def do(task: tuple[str, int]) -> tuple[int, int]:
        what, number = task
        if what == "slow":
            time.sleep(0.5)
        if what == "refuse":
            raise InputError("a", "b", "c")
        if what == "die" or (what == "die once" and not (Path(job["place"]) / "died").exists()):
            (Path(job["place"]) / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number, os.getpid()

    return "ready", do


@pytest.fixture(scope="module", autouse=True)
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One local cluster for all; a crew uses one that it finds."""
    with cluster(2, tmp_path_factory.mktemp("ray")):
        yield


def done(hired: Crew, *kinds: str) -> list[tuple[int, int]]:
    return list(hired.do([(kind, number) for number, kind in enumerate(kinds)], lambda task: f"task {task[1]}"))


def opened(place: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in place.glob("opened-*")]


def crew_at(place: Path, **job: Any) -> Any:
    job = {"place": str(place), **job}
    return crew(ENTRY, job, workers=2, threads=1, device="cpu", folder=place)


def test_results_come_in_order_a_killed_worker_is_replaced_and_all_end_with_the_block(tmp_path: Path) -> None:
    with crew_at(tmp_path) as hired:
        found = done(hired, "slow", "plain", "die once", *["plain"] * 20)
        assert [square for square, _ in found] == [number**2 for number in range(23)]
        assert len({worker for _, worker in found}) >= 2
        assert done(hired, "plain")[0][1] in {worker for _, worker in found}  # the same workers, another time
        assert hired.prepared == "ready"
        assert 2 <= len(opened(tmp_path)) <= hired.hired == 3  # the one hired last may have come too late
    until = time.monotonic() + 30
    while any(psutil.pid_exists(worker) for worker in opened(tmp_path)):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_task_that_kills_every_worker_is_tried_a_few_times_and_named(tmp_path: Path) -> None:
    with pytest.raises(TransientError, match="task 1 is finished by one of 3 workers"), crew_at(tmp_path) as hired:
        done(hired, "plain", "die")
    assert MOST_LOST == 2
    assert len(opened(tmp_path)) <= 4


def test_preparing_that_kills_every_worker_is_tried_a_few_times(tmp_path: Path) -> None:
    with pytest.raises(TransientError, match="preparing"), crew_at(tmp_path, dies=True) as hired:
        done(hired, "plain")
    assert len(opened(tmp_path)) == MOST_LOST + 1


def test_a_workers_typed_error_comes_back_as_itself_and_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught, crew_at(tmp_path) as hired:
        done(hired, "refuse")
    assert (caught.value.promised, caught.value.found, caught.value.remedy) == ("a", "b", "c")
    assert len(opened(tmp_path)) == 1
