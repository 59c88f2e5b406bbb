"""What no run refers to is found and goes; what anything kept descends from, and what is at work, stays."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from data_contracts.errors import ArtifactError
from data_contracts.records import OUTSIDE_FILE, Origin, Ref, Request, Result, StoreAddress
from data_contracts.store import Store
from data_contracts.store.garbage import Garbage
from stages import runner
from tests.stages import toys
from tests.stages.test_runner import make, statuses
from tests.stores import blank

DAY = 86400.0


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find_stage", toys.find)


@pytest.fixture
def address(tmp_path: Path) -> StoreAddress:
    return blank(tmp_path)


def chain(address: StoreAddress, name: str, rows: int = 3) -> tuple[str, Result, Result]:
    """Make a pipeline run of two stages: a selection, and a decision from it."""
    store = Store(address)
    run = store.open_run(name, {})
    made = runner.run(make(address, config={"rows": rows}, origin=Origin(run=run, name="select")))
    folded = runner.run(
        Request(
            verb="govern",
            inputs={"selection": made.ref("selection")},
            store=address,
            origin=Origin(run=run, name="govern"),
        )
    )
    store.close_run(run, "FINISHED")
    return run, made, folded


def forget(address: StoreAddress, run: str) -> None:
    """Delete a run as a user does in MLflow."""
    Store(address)._tracking.do(lambda client: client.delete_run(run))


def garbage(address: StoreAddress, days: float = 14.0) -> Garbage:
    return Store(address).garbage(unfinished_seconds=days * DAY)


def found(address: StoreAddress, days: float = 14.0) -> dict[str, str]:
    return {item.name: item.kind for item in garbage(address, days).find()}


def sweep(address: StoreAddress, days: float = 14.0) -> set[str]:
    bin_ = garbage(address, days)
    return {item.name for item in bin_.remove(bin_.find())}


def readable(address: StoreAddress, ref: Ref) -> bool:
    try:
        return Store(address).open(ref, verify=True).is_dir()
    except ArtifactError:
        return False


def test_a_run_that_is_kept_keeps_everything(address: StoreAddress) -> None:
    _, made, folded = chain(address, "one")
    assert found(address) == {}
    assert sweep(address) == set()
    assert readable(address, made.refs["selection"])
    assert readable(address, folded.refs["decision"])


def test_a_deleted_run_lets_go_of_what_only_it_referred_to(address: StoreAddress) -> None:
    first, shared_made, first_folded = chain(address, "one")
    second, other_made, _ = chain(address, "two", rows=4)
    third, adopted, _ = chain(address, "three")
    assert adopted.cached
    forget(address, second)
    listed = found(address)
    assert {other_made.run} < set(listed)
    assert {shared_made.run, first_folded.run, first, third}.isdisjoint(listed)
    assert readable(address, other_made.refs["selection"]), "a dry run removes nothing"
    assert sweep(address) == set(listed)
    assert not readable(address, other_made.refs["selection"])
    forget(address, first)
    assert sweep(address) == {first}, "the third run adopted what the first had made"
    assert readable(address, shared_made.refs["selection"])
    assert found(address) == {}
    assert not runner.run(make(address, config={"rows": 4})).cached, "what went is made again"


def test_what_a_run_of_another_experiment_adopted_stays(address: StoreAddress) -> None:
    first, made, _ = chain(address, "one")
    beside = address.model_copy(update={"experiment": "beside"})
    _, adopted, _ = chain(beside, "two")
    assert (adopted.cached, adopted.run) == (True, made.run)
    forget(address, first)
    assert made.run not in sweep(address)
    assert readable(beside, made.refs["selection"])


def test_what_a_registered_model_descends_from_stays(address: StoreAddress, tmp_path: Path) -> None:
    run, made, folded = chain(address, "one")

    class Candidate:
        ref = folded.refs["decision"]

    Store(address).registry().promote("m", "champion", Candidate(), "", {}, None)
    forget(address, run)
    sweep(address)
    assert readable(address, folded.refs["decision"])
    assert readable(address, made.refs["selection"]), "its input"


def test_deleted_runs_are_left_alone_while_it_is_not_known_what_a_kept_one_descends_from(
    address: StoreAddress,
) -> None:
    first, made, _ = chain(address, "one")
    _, kept, folded = chain(address, "two", rows=4)
    manifest = Store(address).open(folded.refs["decision"]).parent / "manifest.json"
    text = manifest.read_bytes()
    manifest.write_bytes(text[:-5])
    forget(address, first)
    assert found(address) == {}
    assert garbage(address).unreadable == [folded.run]
    manifest.write_bytes(text)
    assert made.run in sweep(address)
    assert readable(address, kept.refs["selection"])


def test_artifacts_of_a_failed_attempt_go_and_its_record_stays(address: StoreAddress) -> None:
    with pytest.raises(RuntimeError):
        runner.run(make(address, knobs={"act": "raise"}))
    store = Store(address)
    (attempt,) = store._attempts.search("tags.`lazytrain.kind` = 'attempt'")
    left = Path(store._backend(attempt.info.run_id).folder) / "selection" / "data.arrow"  # type: ignore[union-attr]
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")  # as a process leaves it that was killed while it published
    assert found(address) == {attempt.info.run_id: "failed attempt"}
    sweep(address)
    assert not left.exists()
    assert statuses(address) == ["FAILED"]


def test_work_that_may_be_resumed_is_kept_for_a_time_and_that_of_a_finished_attempt_is_not(
    address: StoreAddress, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError):
        runner.run(make(address, knobs={"act": "raise"}))
    (home,) = (path for path in Path(address.work_uri).iterdir() if path.is_dir())
    outside = tmp_path / "lt-outside"
    outside.mkdir()
    next(home.glob("claim-*/scratch")).joinpath(OUTSIDE_FILE).write_text(str(outside))
    kept = tmp_path / "kept"
    shutil.copytree(home, kept)
    assert found(address) == {}
    assert found(address, days=0.0) == {home.name: "work"}
    runner.run(make(address))
    assert not home.exists()
    shutil.copytree(kept, home)  # as a process leaves it that was killed between its commit and the end
    assert found(address) == {home.name: "work"}
    assert sweep(address) == {home.name}
    assert not home.exists()
    assert not outside.exists(), "a temporary folder elsewhere goes with the work it belongs to"


def test_work_that_someone_is_at_is_left_alone(address: StoreAddress) -> None:
    store = Store(address)
    identity = "ab" * 32
    (store.work / identity / "claim-1").mkdir(parents=True)
    (store.work / f"{identity}.{'c' * 32}").mkdir()
    lease = store.acquire("select", identity, lambda claim: None)
    assert found(address, days=0.0) == {f"{identity}.{'c' * 32}": "work"}
    bin_ = garbage(address, days=0.0)
    lease.release("ended")  # type: ignore[union-attr]
    listed = bin_.find()
    assert {item.name for item in listed} == {identity, f"{identity}.{'c' * 32}"}
    again = store.acquire("select", identity, lambda claim: None)  # someone begins between the look and the removal
    assert {item.name for item in bin_.remove(listed)} == {f"{identity}.{'c' * 32}"}
    assert (store.work / identity).is_dir()
    again.release("ended")  # type: ignore[union-attr]


def test_a_folder_of_no_run_and_a_stale_cached_copy_go_once_they_are_idle(address: StoreAddress) -> None:
    _, made, _ = chain(address, "one")
    store = Store(address)
    root = Path(address.tracking_uri.removeprefix("sqlite:///")).parent / "artifacts"
    stray, young = root / ("d" * 32), root / ("e" * 32)
    cached = store.work / "cache" / made.refs["selection"].digest
    stale = store.work / "cache" / ("f" * 64)
    for place in (stray, young, cached, stale):
        place.mkdir(parents=True)
        (place / "file").write_bytes(b"12345")
    for place in (stray, cached, stale):
        os.utime(place, (time.time() - 3600,) * 2)
    assert found(address) == {stray.name: "no run", stale.name: "cache"}
    sweep(address)
    assert [place.exists() for place in (stray, young, cached, stale)] == [False, True, True, False]


@pytest.mark.parametrize("moment", ["before the withdrawal", "after the withdrawal", "before the note"])
def test_a_run_that_adopts_what_is_being_removed_ends_with_a_whole_result(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run, made, _ = chain(address, "one")
    forget(address, run)
    bin_ = garbage(address)
    listed = bin_.find()
    assert made.run in {item.name for item in listed}
    store = Store(address)
    live = store.open_run("live", {})
    got: list[Result] = []

    def adopt() -> None:
        got.append(runner.run(make(address, origin=Origin(run=live, name="select"))))

    if moment == "before the withdrawal":
        adopt()
        bin_.remove(listed)
    elif moment == "after the withdrawal":
        look = bin_._look

        def late() -> None:
            adopt()
            look()

        monkeypatch.setattr(bin_, "_look", late)
        bin_.remove(listed)
    else:
        note, swept = Store.note_result, []

        def noted(self: Store, *given: object) -> None:
            if not swept:
                swept.append(bin_.remove(listed))
            note(self, *given)  # type: ignore[arg-type]

        monkeypatch.setattr(Store, "note_result", noted)
        adopt()
    assert readable(address, got[0].refs["selection"])
    assert got[0].refs["selection"].digest == made.refs["selection"].digest
    store.close_run(live, "FINISHED")
    assert [row.refs["selection"].digest for row in Store(address).attempts(live) if row.refs][-1] == made.refs[
        "selection"
    ].digest
    assert made.run not in found(address) or got[0].run != made.run
