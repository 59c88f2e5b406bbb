"""Faults 7, 8, 12, 15 and 22: processes that are signalled or killed at every moment that matters.

A process of its own is forked for each trial, so that a trial costs a fraction of a second, and signals itself: the
moments are every call to the tracking server and every write made durable, one after the other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data_contracts.arrow import read_table
from data_contracts.records import Origin, Request, Result
from data_contracts.store import Store, artifacts, attempts, backends, heartbeat, zombies
from data_contracts.store.process import Process
from data_contracts.store.tracking import Tracking
from stages import runner
from tests.stages import toys
from tests.stages.test_runner import make, statuses
from tests.stores import blank

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find_stage", toys.find)


def _signal_at(number: int, moment: int) -> Callable[[], bool]:
    """Make the call or write with this number signal its own process when it has been made."""
    count = 0

    def passed() -> None:
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), number)

    do, sync = Tracking.do, backends.sync

    def counted_do(self: Tracking, call: Callable[..., object]) -> object:
        answer = do(self, call)
        passed()
        return answer

    def counted_sync(path: Path) -> None:
        sync(path)
        passed()

    Tracking.do = counted_do  # type: ignore[method-assign, assignment]
    backends.sync = artifacts.sync = counted_sync
    return lambda: count >= moment


def _trial(request: Request, number: int, moment: int) -> None:
    reached = _signal_at(number, moment)
    try:
        runner.run(request)
    except SystemExit as end:
        os._exit(int(end.code or 0))
    os._exit(0 if reached() else 77)


def fork(target: Callable[..., None], *given: object) -> int | None:
    process = FORK.Process(target=target, args=given)
    process.start()
    process.join(60)
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_08_12_15_a_signal_at_any_word_with_the_store(tmp_path: Path, number: signal.Signals) -> None:
    """Whenever it comes: no attempt stays RUNNING, nothing half written is adopted, and one commit is made in all."""
    expected = runner.run(make(blank(tmp_path / "whole"))).refs["selection"].digest
    moment, seen = 0, set[int | None]()
    while True:
        moment += 1
        address = blank(tmp_path / str(moment))
        code = fork(_trial, make(address), number, moment)
        if code == 77:  # the work was done before this moment
            break
        seen.add(code)
        if number == signal.SIGKILL:
            Store(address).reconcile()
        assert "RUNNING" not in statuses(address), f"after call {moment}"
        result = runner.run(make(address))
        table = read_table(Store(address).open(result.refs["selection"]) / "data.arrow")
        assert (table.num_rows, result.refs["selection"].digest) == (3, expected)
        assert statuses(address).count("FINISHED") == 1
        state = Store(address)._coordination.state("select", result.identity)
        assert [commit.run for commit in state.commits] == [result.run], f"after call {moment}"
        left = {path.parts[-4] for path in (tmp_path / str(moment) / "store").rglob("data.arrow")}
        assert left <= {result.run} or number == signal.SIGKILL, "what was published of a lost attempt is taken back"
        assert not (Path(address.work_uri) / result.identity).exists()
    assert moment > 20
    assert seen == ({143} if number == signal.SIGTERM else {-signal.SIGKILL})


def _work(request: Request, answer: Path) -> None:
    answer.write_text(runner.run(request).model_dump_json())
    os._exit(0)


def test_22_of_two_runners_one_is_killed_and_the_other_commits_once(tmp_path: Path) -> None:
    address, mark = blank(tmp_path), tmp_path / "started"
    first = FORK.Process(
        target=_work, args=(make(address, knobs={"act": "sleep:60", "started": str(mark)}), tmp_path / "first")
    )
    first.start()
    while not mark.exists():
        assert first.is_alive()
        time.sleep(0.02)
    second = FORK.Process(target=_work, args=(make(address), tmp_path / "second"))
    second.start()
    time.sleep(1.0)
    assert second.is_alive(), "it waits for the first"
    os.kill(first.pid or 0, signal.SIGKILL)
    first.join(30)
    second.join(60)
    assert second.exitcode == 0
    result = Result.model_validate_json((tmp_path / "second").read_text())
    state = Store(address)._coordination.state("select", result.identity)
    assert [commit.run for commit in state.commits] == [result.run]
    assert statuses(address) == ["FINISHED", "FAILED"], "the takeover closed what the dead holder had left open"


def test_07_a_run_elsewhere_that_works_for_long_is_no_zombie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and attempts of another container are watched, and those that give signs of life are let be."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(zombies, "SILENCE_SECONDS", -1.0)  # as though each had begun long ago
    elsewhere = Process(host="elsewhere", place="another boot", pid=1, started=0.0)
    monkeypatch.setattr(attempts, "this_process", lambda: elsewhere)
    store = Store(blank(tmp_path))
    run = store.open_run("long", {})
    effect = store.open_attempt("promote", "ab" * 32, Origin(run=run), shared=False)
    store.beat(None, effect, dict)
    assert store.reconcile(watch_seconds=1.0) == []
    store.finish(effect)
    store.close_run(run, "FINISHED")
    assert store.reconcile(watch_seconds=0.5) == []
    assert [row.status for row in store.runs()] == ["FINISHED"]
    silent = store.open_attempt("promote", "ac" * 32, Origin(run=run), shared=False)
    assert store.reconcile(watch_seconds=0.5) == [silent]
