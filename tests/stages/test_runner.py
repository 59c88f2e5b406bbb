"""The runner: commit or nothing, adopt what was committed, refuse what does not fit, say truly how an attempt ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from data_contracts.arrow import read_table
from data_contracts.errors import ArtifactError, ConfigError, ContractError
from data_contracts.records import Decision, Origin, Ref, Request, Result, StoreAddress
from data_contracts.store import Store, lease
from stages import runner
from stages.stage import Inputs, Work
from tests.conftest import ROOT
from tests.stages import toys
from tests.stores import blank


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find_stage", toys.find)


@pytest.fixture
def address(tmp_path: Path) -> StoreAddress:
    return blank(tmp_path)


def make(address: StoreAddress, **given: Any) -> Request:
    knobs = given.pop("knobs", {})
    request = {"config": {"rows": 3}, "origin": Origin(name="select-1"), **given}
    return Request(verb="select", store=address, knobs=knobs, **request)


def start(request: Request, folder: Path) -> subprocess.Popen[str]:
    path = folder / f"request-{time.monotonic_ns()}.json"
    path.write_text(request.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-c", f"from tests.stages.toys import main; main({str(path)!r})"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return Result.model_validate_json(out)


def statuses(address: StoreAddress) -> list[str]:
    store = Store(address)
    return [run.info.status for run in store._attempts.search("tags.`lazytrain.kind` = 'attempt'")]


def payload(address: StoreAddress, ref: Ref) -> Path:
    return Store(address).open(ref)


def test_a_stage_commits_its_outputs_and_the_next_request_adopts_them(address: StoreAddress, tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = runner.run(make(address, knobs={"log": str(log)}))
    second = runner.run(make(address, knobs={"log": str(log)}))
    assert (first.cached, second.cached) == (False, True)
    assert second.refs == first.refs
    assert second.run == first.run
    assert len(log.read_text().splitlines()) == 1
    assert read_table(payload(address, first.refs["selection"]) / "data.arrow").column("rank").to_pylist() == [0, 1, 2]
    assert statuses(address) == ["FINISHED"]
    assert not (Path(address.work_uri) / first.identity).exists()


def test_a_stage_that_quarantines_nothing_gives_an_empty_quarantine(address: StoreAddress) -> None:
    assert runner.run(make(address)).refs["quarantine"].rows == 0


def test_a_quarantine_comes_out_sorted_whatever_the_order_it_was_recorded_in(address: StoreAddress) -> None:
    result = runner.run(make(address, knobs={"refuse": True}))
    table = read_table(payload(address, result.refs["quarantine"]) / "data.arrow")
    assert table.column("row").to_pylist() == [1, 2]


def test_a_changed_config_is_other_work_and_knobs_are_not(address: StoreAddress) -> None:
    first = runner.run(make(address))
    assert not runner.run(make(address, config={"rows": 4})).cached
    assert runner.run(make(address, knobs={"level": "debug"})).refs == first.refs


def test_inputs_count_by_content_not_by_the_run_that_made_them(address: StoreAddress) -> None:
    first = runner.run(make(address))
    again = runner.run(make(address, refresh=True))
    assert again.run != first.run
    assert again.refs["selection"].digest == first.refs["selection"].digest
    folded = [
        runner.run(Request(verb="govern", inputs={"selection": made.ref("selection")}, store=address))
        for made in (first, again)
    ]
    assert [item.cached for item in folded] == [False, True]


def test_a_refresh_makes_a_new_attempt_and_leaves_the_commit_as_it_was(address: StoreAddress) -> None:
    first = runner.run(make(address))
    before = {path: path.stat().st_mtime_ns for path in payload(address, first.refs["selection"]).rglob("*")}
    again = runner.run(make(address, refresh=True))
    assert (again.cached, again.run == first.run) == (False, False)
    assert runner.run(make(address)).run == first.run
    assert {path: path.stat().st_mtime_ns for path in payload(address, first.refs["selection"]).rglob("*")} == before
    assert Store(address).read_manifest(again.run).identity == first.identity


def test_an_effect_is_never_adopted(address: StoreAddress) -> None:
    made = runner.run(make(address))
    request = Request(verb="promote", inputs={"selection": made.ref("selection")}, store=address)
    runs = [runner.run(request) for _ in range(2)]
    assert [item.cached for item in runs] == [False, False]
    assert runs[0].run != runs[1].run


def test_a_stage_sees_what_its_inputs_had_cost_and_only_that(address: StoreAddress) -> None:
    made = runner.run(make(address))
    runner.run(make(address, config={"rows": 9}))
    folded = runner.run(Request(verb="govern", inputs={"selection": made.ref("selection")}, store=address))
    assert Store(address).record(folded.refs["decision"], Decision).numbers["flops"] == 7
    assert Store(address).ledger([folded.refs["decision"]]).total.flops == 7


def test_what_is_decided_by_the_ledger_is_adopted_only_where_the_same_was_spent(address: StoreAddress) -> None:
    def fold(*decision: Ref, on: Result) -> Result:
        inputs = {"selection": on.ref("selection"), "decision": decision}
        return runner.run(Request(verb="govern", inputs=inputs, store=address))

    first, same, other = (runner.run(make(address, config=config)) for config in ({}, {"seed": 1}, {"start": 2.0}))
    assert first.refs["selection"].digest == same.refs["selection"].digest != other.refs["selection"].digest
    assert first.identity != same.identity
    decided = [fold(on=made) for made in (first, same, other)]
    assert [result.cached for result in decided] == [False, True, False]  # what both made was needed once
    assert len({result.refs["decision"].digest for result in decided}) == 1
    # equal bytes, but what they descend from is not the same
    after = [fold(decided[place].refs["decision"], on=first) for place in (0, 2, 0)]
    assert [result.cached for result in after] == [False, False, True]


def test_what_is_shared_is_amortised_over_the_configurations_whose_runs_were_given_it(address: StoreAddress) -> None:
    store, given = Store(address), {}
    opened = {
        "first": store.open_run("a", {"name": "a"}),
        "again": store.open_run("a", {"name": "a"}),  # the same configuration: the same user
        "other": store.open_run("b", {"name": "b"}),
    }
    opened["resumed"] = store.open_run("b", {"name": "b", "budget": 2}, resumes=opened["other"])  # of the same user too
    for name, run in opened.items():
        given[name] = runner.run(make(address, origin=Origin(run=run, name="select-1")))
    own = runner.run(make(address, config={"rows": 4}, origin=Origin(run=opened["other"], name="select-2")))
    alone = runner.run(make(address, config={"rows": 5}))
    made = given["first"]
    assert [result.cached for result in given.values()] == [False, True, True, True]
    users = store.users()
    assert users == {made.run: 2, own.run: 1}
    refs = [result.refs["selection"] for result in (made, own, alone)]
    whole, part = store.ledger(refs).total, store.ledger(refs, users=users).total
    assert (whole.flops, whole.tokens) == (21, 6)
    assert (part.flops, part.tokens) == (4 + 7 + 7, 1 + 2 + 2)  # 7 FLOPs halved are 3.5, rounded to even
    shared = made.costs["select"].seconds
    assert part.seconds == pytest.approx(whole.seconds - shared / 2)
    assert part.peak_bytes == whole.peak_bytes


def test_a_stage_that_does_not_say_that_it_reads_the_ledger_is_not_shown_it(address, monkeypatch) -> None:
    made = runner.run(make(address))
    monkeypatch.setattr(toys.STAGES["govern"], "reads_ledger", False)
    with pytest.raises(ArtifactError, match="govern does not"):
        runner.run(Request(verb="govern", inputs={"selection": made.ref("selection")}, store=address))


def test_wall_seconds_and_peak_memory_are_charged_once_under_the_stages_own_cause(address: StoreAddress) -> None:
    begun = time.monotonic()
    costs = runner.run(make(address)).costs
    elapsed = time.monotonic() - begun
    assert set(costs) == {"select"}
    assert costs["select"].flops == 7
    assert 0 < costs["select"].seconds <= elapsed
    assert costs["select"].peak_bytes > 10_000_000


def test_an_adopted_cost_is_that_of_the_manifest(address: StoreAddress) -> None:
    first = runner.run(make(address))
    assert runner.run(make(address)).costs == first.costs


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "add", "manifest"])
def test_a_damaged_payload_is_noticed_and_made_again(address: StoreAddress, damage: str) -> None:
    first = runner.run(make(address))
    folder = payload(address, first.refs["selection"])
    file = folder / "data.arrow"
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
    elif damage == "truncate":
        file.write_bytes(file.read_bytes()[:-8])
    elif damage == "delete":
        file.unlink()
    elif damage == "add":
        (folder / "stray.txt").write_text("x")
    else:
        manifest = folder.parent / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"rows": 3', '"rows": 4'))
    with pytest.raises(ArtifactError):
        Store(address).open(first.refs["selection"])
    second = runner.run(make(address))
    assert (second.cached, second.run == first.run) == (False, False)
    assert second.refs["selection"].digest == first.refs["selection"].digest
    assert runner.run(make(address)).run == second.run


def test_verify_reads_every_byte_even_where_a_file_claims_to_be_unchanged(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runner.run(make(address))
    file = payload(address, first.refs["selection"]) / "data.arrow"
    good = file.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    file.write_bytes(bytes(bad))
    store = Store(address)
    sha = store.read_manifest(first.run).outputs["selection"].content[0].sha256
    stat = file.stat()
    store._hashes._remember(file.resolve(), (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino), sha)
    assert runner.run(make(address)).cached  # the memory was made to lie
    assert not runner.run(make(address, knobs={"verify": True})).cached


def test_a_failing_stage_commits_nothing_and_its_run_ends_failed(address: StoreAddress) -> None:
    with pytest.raises(RuntimeError, match="the toy broke"):
        runner.run(make(address, knobs={"act": "raise"}))
    assert statuses(address) == ["FAILED"]
    assert list((Path(address.tracking_uri[10:]).parent / "artifacts").rglob("*.arrow")) == []
    visits = next(Path(address.work_uri).rglob("visits"))
    assert visits.read_text() == "1"
    result = runner.run(make(address))
    assert not result.cached
    assert Store(address).read_manifest(result.run).summary.measured["visits"] == 2  # the scratch was kept


def test_a_killed_stage_leaves_no_artifact_and_the_next_attempt_resumes(address: StoreAddress, tmp_path: Path) -> None:
    process = start(make(address, knobs={"act": "sigkill"}), tmp_path)
    process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert statuses(address) == ["RUNNING"]
    assert list((Path(address.tracking_uri[10:]).parent / "artifacts").rglob("*.arrow")) == []
    closed = Store(address).reconcile()
    assert len(closed) == 1
    assert statuses(address) == ["FAILED"]
    begun = time.monotonic()
    result = runner.run(make(address))
    assert time.monotonic() - begun < 20, "a dead holder of this host is taken over without waiting"
    assert not result.cached
    manifest = Store(address).read_manifest(result.run)
    assert manifest.summary.measured["visits"] == 2
    assert manifest.outputs["selection"].ref.rows == 3  # nothing of the lost attempt was appended to


def test_a_terminated_stage_exits_143_and_its_run_ends_killed(address: StoreAddress, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    process = start(make(address, knobs={"act": "sleep:60", "started": str(mark)}), tmp_path)
    while not mark.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert statuses(address) == ["KILLED"]
    assert list(Path(address.work_uri).rglob("visits")), "the work folder is kept"
    assert runner.run(make(address)).cached is False


def test_an_adopted_stage_imports_no_torch(address: StoreAddress, tmp_path: Path) -> None:
    runner.run(make(address))
    process = start(make(address), tmp_path)
    out, err = process.communicate(timeout=60)
    assert Result.model_validate_json(out).cached
    assert json.loads(err.strip().splitlines()[-1]) == {"torch": False}


def test_two_processes_at_the_same_work_make_one_commit(address: StoreAddress, tmp_path: Path) -> None:
    log, mark = tmp_path / "log", tmp_path / "started"
    knobs = {"act": "sleep:1.5", "started": str(mark), "log": str(log)}
    results = [finish(process) for process in [start(make(address, knobs=knobs), tmp_path) for _ in range(2)]]
    assert len({result.run for result in results}) == 1
    assert sorted(result.cached for result in results) == [False, True]
    assert len(log.read_text().splitlines()) == 1
    assert statuses(address) == ["FINISHED"]


@pytest.mark.parametrize("late_at", ["work", "commit"])
def test_a_woken_stale_holder_adopts_the_commit_of_who_took_over(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch, late_at: str
) -> None:
    monkeypatch.setattr(lease.acquire, "__kwdefaults__", {"silence_seconds": 0.3, "poll_seconds": 0.05})
    winner: list[Result] = []

    def elsewhere() -> None:
        if not winner:
            winner.append(Result(stage="", identity="", run="", cached=False, refs={}))
            winner[0] = runner.run(make(address))  # the first holder has been silent for long: it is taken over

    class Sleepy(toys.Make):
        def run(self, config: toys.MakeSlice, inputs: Inputs, work: Work) -> Any:
            if late_at == "work":
                elsewhere()
            return super().run(config, inputs, work)

    class Late(lease.Lease):
        def commit(self, run: str, manifest: str) -> lease.Commit:
            if late_at == "commit":
                elsewhere()
            return super().commit(run, manifest)

    monkeypatch.setattr(lease, "Lease", Late)
    monkeypatch.setitem(toys.STAGES, "select", Sleepy())
    late = runner.run(make(address))
    assert late.run == winner[0].run
    assert (winner[0].cached, late.cached) == (False, True)
    assert sorted(statuses(address)) == sorted(["FINISHED", "KILLED" if late_at == "commit" else "FAILED"])
    left = list((Path(address.tracking_uri[10:]).parent / "artifacts").rglob("*.arrow"))
    assert left
    assert all(winner[0].run in str(path) for path in left)


def test_unknown_missing_and_ill_fitting_requests_are_refused_before_an_attempt(address: StoreAddress) -> None:
    made = runner.run(make(address))
    selection, quarantine = made.ref("selection"), made.ref("quarantine")
    with pytest.raises(ConfigError, match="did you mean 'rows'"):
        runner.run(make(address, config={"row": 3}))
    with pytest.raises(ConfigError, match="did you mean 'selection'"):
        runner.run(Request(verb="govern", inputs={"selections": selection}, store=address))
    with pytest.raises(ArtifactError, match="was not given"):
        runner.run(Request(verb="govern", store=address))
    with pytest.raises(ArtifactError, match="quarantine"):
        runner.run(Request(verb="govern", inputs={"selection": quarantine}, store=address))
    altered = selection[0].model_copy(update={"digest": "0" * 64})
    with pytest.raises(ArtifactError, match="another digest"):
        runner.run(Request(verb="govern", inputs={"selection": (altered,)}, store=address))
    lost = selection[0].model_copy(update={"run": "0" * 32})
    with pytest.raises(ArtifactError, match="it is not"):
        runner.run(Request(verb="govern", inputs={"selection": (lost,)}, store=address))
    assert statuses(address) == ["FINISHED"]


def test_an_output_that_breaks_its_contract_is_not_committed(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(toys.Make):
        def run(self, config: toys.MakeSlice, inputs: Inputs, work: Work) -> Any:
            work.table("selection", {**toys.selection(3, 1.0), "rank": [0, 2, 1]})
            return toys.Summary(title="wrong")

    monkeypatch.setitem(toys.STAGES, "select", Wrong())
    with pytest.raises(ContractError, match="sorted and unique"):
        runner.run(make(address))
    assert statuses(address) == ["FAILED"]
    assert Store(address).committed("select", "0" * 64) is None


def test_a_declared_output_that_was_not_made_is_an_error(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Empty(toys.Make):
        def run(self, config: toys.MakeSlice, inputs: Inputs, work: Work) -> Any:
            return toys.Summary(title="empty")

    monkeypatch.setitem(toys.STAGES, "select", Empty())
    with pytest.raises(ArtifactError, match="it made no selection"):
        runner.run(make(address))


def test_a_pipeline_run_remembers_what_was_made_and_what_was_adopted(address: StoreAddress) -> None:
    store = Store(address)
    first = store.open_run("one", {"seed": 1})
    second = store.open_run("two", {"seed": 1})
    made = runner.run(make(address, origin=Origin(run=first, name="select-1", round=1)))
    runner.run(make(address, origin=Origin(run=second, name="select-1", round=1)))
    assert [(row.name, row.cached, row.round) for row in store.attempts(first)] == [("select-1", False, 1)]
    assert [(row.name, row.cached) for row in store.attempts(second)] == [("select-1", True)]
    assert store.attempts(second)[0].refs == made.refs
    assert store.find_attempt(second, "select-1").run == made.run
    assert store.find_attempt(second, "select").run == made.run
    assert store.run_config(first) == {"seed": 1}
    with pytest.raises(ArtifactError, match="select-1"):
        store.find_attempt(second, "train")
    store.close_run(first, "FINISHED")
    assert {row.name: row.status for row in store.runs()} == {"one": "FINISHED", "two": "RUNNING"}


def test_a_stages_random_numbers_depend_on_seed_and_names_alone(address: StoreAddress) -> None:
    made = runner.run(make(address))
    requests = [
        Request(verb="govern", config={"reason": reason}, inputs={"selection": made.ref("selection")}, store=address)
        for reason in ("one", "two")
    ]
    draws = {Store(address).record(runner.run(item).refs["decision"], Decision).numbers["draw"] for item in requests}
    assert len(draws) == 1


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/proc/mounts").exists(), reason="needs root to mount a small disk")
def test_a_full_disk_fails_the_stage_names_the_folder_and_commits_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("this machine does not let root mount a file system")
    try:
        address = blank(tmp_path).model_copy(update={"work_uri": str(small / "work")})
        with pytest.raises(ArtifactError, match="No space left on device") as caught:
            runner.run(make(address, knobs={"act": "fill:8"}))
        assert str(small) in caught.value.promised
        assert statuses(address) == ["FAILED"]
        (next(small.rglob("large"))).unlink()
        assert not runner.run(make(address)).cached
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_the_newest_commit_of_the_same_kin_is_offered_and_no_other(address: StoreAddress) -> None:
    def earlier(**config: Any) -> Any:
        result = runner.run(make(address, config=config))
        assert not result.cached
        return Store(address).read_manifest(result.run).summary.measured["earlier"]

    assert earlier(rows=3) == 0
    assert earlier(rows=4) == 3
    assert earlier(rows=5) == 4
    assert earlier(rows=5, start=2.0) == 0  # another kin
    with pytest.raises(RuntimeError, match="the toy broke"):
        runner.run(make(address, config={"rows": 6}, knobs={"act": "raise"}))
    assert earlier(rows=7) == 5  # not the one that failed
    newest = Store(address)
    for manifest in newest.kindred("select", next(_kins(newest))):
        (payload(address, manifest.outputs["selection"].ref) / "data.arrow").write_bytes(b"")
        break
    assert earlier(rows=8) == 5  # the newest is damaged; the one before is whole


def _kins(store: Store) -> Any:
    for item in store._attempts.search("tags.`lazytrain.kind` = 'attempt'"):
        yield item.data.tags["lazytrain.kin"]
