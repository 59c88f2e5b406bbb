"""One commit an identity, whatever races, dies or wakes up late."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from data_contracts.records import StoreAddress
from data_contracts.store import lease as leases
from data_contracts.store.lease import Commit, Coordination, Lease, State, acquire, state_of
from data_contracts.store.process import Process, this_process
from data_contracts.store.tracking import Tracking
from tests.stores import blank, cold

IDENTITY = "ab" * 32
ELSEWHERE = Process(host="elsewhere", place="another boot", pid=1, started=0.0)


def never(state: State) -> bool:
    return False


def quiet(claim: leases.Claim) -> None:
    pass


def hold(coordination: Coordination, **given: Any) -> Lease:
    held = acquire(coordination, "train", IDENTITY, never, quiet, poll_seconds=0.05, **given)
    assert held is not None
    return held


@pytest.fixture
def coordination(tmp_path: Path) -> Coordination:
    return Coordination(Tracking(blank(tmp_path)))


def test_a_released_claim_is_followed_at_once_by_the_next(coordination: Coordination) -> None:
    first = hold(coordination)
    first.release("failed")
    second = hold(coordination)
    assert (first.number, second.number) == (1, 2)
    second.release("done")
    tags = coordination.tracking.do(lambda client: client.get_run(coordination.of("train", IDENTITY))).data.tags
    assert not [tag for tag in tags if tag.startswith("heartbeat.")]


def test_a_waiter_adopts_what_the_holder_commits(coordination: Coordination) -> None:
    held = hold(coordination)
    told: list[leases.Claim] = []
    seen: list[State] = []

    def adopt(state: State) -> bool:
        seen.append(state)
        return bool(state.commits)

    waiter = threading.Thread(
        target=lambda: seen.append(acquire(coordination, "train", IDENTITY, adopt, told.append, poll_seconds=0.05))  # type: ignore[arg-type]
    )
    waiter.start()
    time.sleep(0.5)
    assert waiter.is_alive()
    held.commit("run-1", "m")
    held.release("committed")
    waiter.join(timeout=20)
    assert seen[-1] is None
    assert seen[-2].commits == (Commit(number=1, run="run-1", manifest="m"),)
    assert len(told) == 1, "told once of whom it waits for"


def test_the_first_of_two_commits_of_one_number_stands(coordination: Coordination) -> None:
    first = hold(coordination)
    second = hold(coordination, silence_seconds=0.0)
    assert second.commit("run-2", "m2") == Commit(number=1, run="run-2", manifest="m2")
    assert first.commit("run-1", "m1") == Commit(number=1, run="run-2", manifest="m2")
    assert coordination.state("train", IDENTITY).commits == (Commit(number=1, run="run-2", manifest="m2"),)


def test_a_commit_that_was_found_bad_is_followed_by_a_newer_one(coordination: Coordination) -> None:
    first = hold(coordination)
    first.commit("run-1", "m1")
    first.release("committed")
    second = hold(coordination)
    assert second.commit("run-2", "m2").number == 2
    assert [commit.run for commit in coordination.state("train", IDENTITY).commits] == ["run-1", "run-2"]


def test_a_silent_holder_on_another_host_is_taken_over_and_a_beating_one_is_not(
    coordination: Coordination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "this_process", lambda: ELSEWHERE)
    monkeypatch.setattr("data_contracts.store.heartbeat.BEAT_SECONDS", 0.2)
    first = hold(coordination)
    taken: list[float] = []
    waiter = threading.Thread(target=lambda: taken.append(hold(coordination, silence_seconds=1.5).number))
    waiter.start()
    time.sleep(3.0)
    assert taken == [], "its heartbeat changes"
    first.heartbeat.stop()
    waiter.join(timeout=20)
    assert taken == [2]


def test_identities_of_one_coordination_run_do_not_mix() -> None:
    params = {f"{IDENTITY}.commit.1": "r:m", f"{'ac' * 32}.commit.1": "s:n", f"x{IDENTITY}.commit.2": "t:o"}
    assert [commit.run for commit in state_of(params, IDENTITY).commits] == ["r"]


def test_a_process_is_known_to_be_gone_only_where_it_can_be_seen() -> None:
    here = this_process()
    assert not here.gone()
    assert here.model_copy(update={"started": here.started - 100}).gone(), "the pid was reused"
    assert not ELSEWHERE.gone()
    assert not ELSEWHERE.model_copy(update={"host": here.host}).gone(), "another container of this host"


def _commit_alone(address: StoreAddress, ready: Any, found: Any, number: int) -> None:
    ready.wait()
    coordination = Coordination(Tracking(address))
    lease = acquire(coordination, "train", IDENTITY, lambda state: bool(state.commits), quiet, poll_seconds=0.05)
    if lease is not None:
        time.sleep(0.2)
        lease.commit(f"run-{number}", "m")
        lease.release("committed")
    coordination.tracking.once(coordination.of("train", IDENTITY), f"record.{number}", str(number))
    found.put((number, lease is not None, coordination.root()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_processes_on_a_cold_database_lose_nothing_and_commit_once(tmp_path: Path) -> None:
    """SQLite "database is locked" and the race to make the tables are the faults that this stands against."""
    address = cold(tmp_path)
    context = multiprocessing.get_context("spawn")
    ready, found = context.Event(), context.Queue()
    processes = [context.Process(target=_commit_alone, args=(address, ready, found, number)) for number in range(8)]
    for process in processes:
        process.start()
    ready.set()
    answers = [found.get(timeout=280) for _ in processes]
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0] * 8
    assert sum(won for _, won, _ in answers) == 1
    assert len({root for _, _, root in answers}) == 1, "racing creators agree on the coordination run"
    coordination = Coordination(Tracking(address))
    assert len(coordination.state("train", IDENTITY).commits) == 1
    params = coordination.tracking.params(coordination.of("train", IDENTITY))
    assert sorted(value for key, value in params.items() if key.startswith("record.")) == [str(n) for n in range(8)]


def _hold_until_killed(address: StoreAddress, held: Any) -> None:
    hold(Coordination(Tracking(address)))
    held.set()
    time.sleep(300)


def test_a_killed_holder_of_this_host_is_taken_over_without_waiting(tmp_path: Path) -> None:
    address = blank(tmp_path)
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=_hold_until_killed, args=(address, held))
    process.start()
    assert held.wait(timeout=120)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(timeout=30)
    begun = time.monotonic()
    assert hold(Coordination(Tracking(address)), silence_seconds=600.0).number == 2
    assert time.monotonic() - begun < 10
