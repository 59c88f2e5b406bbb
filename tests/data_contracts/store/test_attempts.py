"""Statuses are true, whatever ended the process, and reconciling closes only what is certain to be over."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from data_contracts.cost import Cost
from data_contracts.records import Origin, Summary
from data_contracts.store import Store, attempts
from data_contracts.store.heartbeat import HEARTBEAT
from data_contracts.store.process import Process, this_process
from tests.stores import blank

IDENTITY = "cd" * 32
HERE = this_process()
DEAD = HERE.model_copy(update={"started": HERE.started - 1000})
ELSEWHERE = Process(host="elsewhere", place="another boot", pid=1, started=0.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(blank(tmp_path))


def opened(
    store: Store, monkeypatch: pytest.MonkeyPatch, process: Process, *, age: float = 0.0, shared: bool = True
) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "this_process", lambda: process)
        patch.setattr(attempts, "stamp", lambda: f"{time.time() - age:.3f}")
        return store.open_attempt("train", IDENTITY, Origin(), shared=shared)


def status(store: Store, run: str) -> str:
    return str(store._tracking.do(lambda client: client.get_run(run)).info.status)


def test_a_run_whose_process_is_gone_is_closed_as_failed_with_a_reason(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = opened(store, monkeypatch, DEAD), opened(store, monkeypatch, HERE)
    assert store.reconcile() == [dead]
    assert (status(store, dead), status(store, alive)) == ("FAILED", "RUNNING")
    tags = store._tracking.do(lambda client: client.get_run(dead)).data.tags
    assert "ended without a word" in tags["lazytrain.reason"]
    assert store.reconcile() == []


def test_a_pipeline_run_whose_process_is_gone_is_closed_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "this_process", lambda: DEAD)
        run = store.open_run("pipe", {})
    assert store.reconcile() == [run]
    assert store.runs()[0].status == "FAILED"


def test_a_run_of_another_host_is_closed_only_after_it_stayed_silent_while_watched(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = opened(store, monkeypatch, ELSEWHERE, age=3600)
    beating = opened(store, monkeypatch, ELSEWHERE, age=3600)
    young = opened(store, monkeypatch, ELSEWHERE)
    monkeypatch.setattr(
        "data_contracts.store.zombies.time.sleep", lambda seconds: store._tracking.tag(beating, {HEARTBEAT: "1"})
    )
    assert store.reconcile(watch_seconds=0.1) == [silent]
    assert [status(store, run) for run in (silent, beating, young)] == ["FAILED", "RUNNING", "RUNNING"]


def test_a_process_that_ended_after_its_commit_counts_as_finished(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(store, monkeypatch, DEAD)
    held = store.acquire("train", IDENTITY, lambda claim: None)
    held.commit(run, "m")  # type: ignore[union-attr]
    assert store.reconcile() == [run]
    assert status(store, run) == "FINISHED"


def test_an_effect_that_ended_after_its_manifest_counts_as_finished(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = (opened(store, monkeypatch, DEAD, shared=False) for _ in range(2))
    store._attempts.say(after, Summary(title=""), {}, manifest="m")
    assert sorted(store.reconcile()) == sorted([before, after])
    assert (status(store, before), status(store, after)) == ("FAILED", "FINISHED")


def test_a_summary_larger_than_a_batch_is_logged_whole(store: Store) -> None:
    run = store.open_attempt("train", IDENTITY, Origin(), shared=True)
    facts = {f"number@{i}": float(i) for i in range(900)} | {f"word@{i}": f"w{i}" for i in range(150)}
    store._attempts.say(run, Summary(title="much", facts=facts), {"train": Cost(flops=5)})
    data = store._tracking.do(lambda client: client.get_run(run)).data
    assert len(data.metrics) == 901
    assert len(data.params) == 150
    assert sum(key.startswith("name.") for key in data.tags) == 1050


def test_lost_attempts_are_in_the_ledger_for_people_and_not_in_the_one_for_decisions(tmp_path: Path) -> None:
    from stages import runner
    from tests.stages import toys
    from tests.stages.test_runner import make

    address = blank(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "find_stage", toys.find)
        with pytest.raises(RuntimeError):
            runner.run(make(address, knobs={"act": "raise"}))
        made = runner.run(make(address))
    store = Store(address)
    assert store.ledger(made.ref("selection")).total.flops == 7
    assert store.ledger(made.ref("selection"), lost=True).total.flops == 14
