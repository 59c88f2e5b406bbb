"""The uploading backend, against a real MLflow server that proxies its artifacts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_contracts.arrow import read_table
from data_contracts.config_file import load
from data_contracts.errors import ArtifactError
from data_contracts.records import Origin, Request, Result, StoreAddress
from data_contracts.store import Store, uploading
from stages import __main__ as entry
from stages import runner
from stages.stage import find_stage
from tests.conftest import ROOT
from tests.flows.small_run import lay_out
from tests.infra.services import free_port
from tests.stages import toys
from tests.stages.test_runner import make
from tests.stores import blank

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Start a server on loopback; yield its address and the folder where it keeps artifacts."""
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
            *("--backend-store-uri", blank(folder).tracking_uri, "--serve-artifacts"),
            *("--artifacts-destination", str(folder / "kept")),
        ],
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 240
        while True:
            assert process.poll() is None, "the server ended"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < until, "the server does not answer"
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", folder / "kept"
    finally:
        os.killpg(process.pid, 15)
        process.wait(timeout=60)


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find_stage", toys.find)


def address(server: tuple[str, Path], folder: Path) -> StoreAddress:
    return StoreAddress(tracking_uri=server[0], work_uri=str(folder / "work"), experiment=folder.name)


def test_what_is_uploaded_is_read_back_adopted_and_the_same_as_in_place(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    here = address(server, tmp_path)
    config = {"rows": 5}
    made = runner.run(make(here, config=config))
    assert list(server[1].rglob("manifest.json")), "the artifacts are the server's"
    again = runner.run(make(here, config=config))
    assert (made.cached, again.cached, again.refs) == (False, True, made.refs)
    beside = runner.run(make(blank(tmp_path / "beside"), config=config))
    assert beside.identity == made.identity
    assert beside.refs["selection"].digest == made.refs["selection"].digest


def test_a_stage_against_a_server_prints_its_result_and_nothing_else(
    server: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    path.write_text(make(address(server, tmp_path), config={"rows": 4}).model_dump_json())
    assert entry.main(["select", str(path)]) == 0
    assert Result.model_validate_json(capsys.readouterr().out).cached is False


def test_another_machine_reads_by_reference_through_a_cache_of_its_own(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    made = runner.run(make(address(server, tmp_path), config={"rows": 6}))
    elsewhere = address(server, tmp_path).model_copy(update={"work_uri": str(tmp_path / "elsewhere")})
    folder = Store(elsewhere).open(made.refs["selection"])
    assert read_table(folder / "data.arrow").num_rows == 6
    assert (Store(elsewhere).measured(made.refs["selection"]) / "times.json").read_text() == "{}"
    assert folder.is_relative_to(tmp_path / "elsewhere")
    request = Request(verb="govern", inputs={"selection": made.ref("selection")}, store=elsewhere)
    assert not runner.run(request).cached


def test_a_bad_cached_copy_is_fetched_again_and_a_bad_payload_is_noticed(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    here = address(server, tmp_path)
    made = runner.run(make(here, config={"rows": 7}))
    cached = Store(here).open(made.refs["selection"]) / "data.arrow"
    good = cached.read_bytes()
    cached.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert (Store(here).open(made.refs["selection"]) / "data.arrow").read_bytes() == good
    kept = next(path for path in server[1].rglob("data.arrow") if path.read_bytes() == good)
    kept.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    cached.unlink()
    with pytest.raises(ArtifactError, match="bytes changed"):
        Store(here).open(made.refs["selection"])
    rebuilt = runner.run(make(here, config={"rows": 7}))
    assert (rebuilt.cached, rebuilt.refs["selection"].digest) == (False, made.refs["selection"].digest)


def test_the_cache_is_bounded_and_drops_what_was_used_longest_ago(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "GRACE_SECONDS", -1.0)
    here = address(server, tmp_path)
    refs = [runner.run(make(here, config={"rows": rows})).refs["selection"] for rows in (20, 21, 22)]
    elsewhere = here.model_copy(update={"work_uri": str(tmp_path / "elsewhere")})
    store = Store(elsewhere, cache_bytes=refs[1].bytes + refs[2].bytes + 10)
    places = []
    for ref in refs:
        places.append(store.open(ref))
        time.sleep(0.05)
    assert [place.is_dir() for place in places] == [False, True, True]
    assert store.open(refs[0]).is_dir()
    assert [place.is_dir() for place in places] == [True, False, True]


def test_a_pipeline_run_keeps_its_config_and_summary_on_the_server(server: tuple[str, Path], tmp_path: Path) -> None:
    store = Store(address(server, tmp_path))
    run = store.open_run("pipe", {"seed": 3})
    store.close_run(run, "FINISHED", toys.Summary(title="done", facts={"loss": 1.5}))
    assert store.run_config(run) == {"seed": 3}
    summary = store.run_summary(run)
    assert summary is not None
    assert summary.facts == {"loss": 1.5}


def test_a_promotion_through_the_server_names_its_run_not_a_path(server: tuple[str, Path], tmp_path: Path) -> None:
    from tests.data_contracts.store.test_registry import candidate, promote

    store = Store(address(server, tmp_path))
    made = candidate(store, "e")
    assert promote(store, made, None).checkpoint == made.ref
    current = store.registry().current("toy", "champion")
    assert current is not None
    assert current.checkpoint == made.ref


def test_what_no_run_refers_to_is_removed_from_the_server_and_from_the_cache(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    here = address(server, tmp_path)
    store = Store(here)
    run = store.open_run("pipe", {})
    made = runner.run(make(here, config={"rows": 11}, origin=Origin(run=run)))
    store.close_run(run, "FINISHED")
    cached = Store(here).open(made.refs["selection"])
    payload = next(path for path in server[1].rglob("data.arrow") if made.run in path.parts)
    store._tracking.do(lambda client: client.delete_run(run))
    os.utime(cached, (time.time() - 3600,) * 2)
    garbage = Store(here).garbage(unfinished_seconds=0.0)
    found = garbage.find()
    assert {(item.kind, item.name) for item in found} >= {("deleted run", made.run), ("deleted run", run)}
    assert {item.name for item in found if item.kind == "cache"} == {cached.name}
    garbage.remove(found)
    assert not payload.exists()
    assert not cached.exists()
    assert not runner.run(make(here, config={"rows": 11})).cached


@pytest.mark.shared
def test_a_base_model_in_a_folder_is_found_by_another_process(
    server: tuple[str, Path], tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it lies is a measured file: it is fetched beside the record, which says nothing of a place."""
    monkeypatch.setattr(runner, "find_stage", find_stage)  # the real ones
    url, _ = server
    address = StoreAddress(tracking_uri=url, work_uri=str(tmp_path / "work"), experiment="other-process")
    lay_out(tmp_path, shared)
    config = load(tmp_path / "lazytrain.yaml")
    knobs = {"root": str(tmp_path)}
    data = runner.run(Request(verb="ingest", config=config.slice("ingest"), store=address, knobs=knobs))
    inputs = {"base": data.ref("base"), "pool_tokens": data.ref("pool_tokens")}
    request = Request(verb="plan", config=config.slice("plan"), inputs=inputs, store=address, knobs=knobs)
    (tmp_path / "request.json").write_text(request.model_dump_json())
    environment = {name: value for name, value in os.environ.items() if name != "LAZYTRAIN_MODELS"}
    done = subprocess.run(
        [sys.executable, "-m", "stages", "plan", str(tmp_path / "request.json")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert Result.model_validate_json(done.stdout).refs["plan"].digest
