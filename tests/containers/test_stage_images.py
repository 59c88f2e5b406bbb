"""A stage in its image: the same digest as anywhere else, exit codes that tell the end, adoption wherever it is mounted.

The root is read-only, the user has no rights, the store belongs to that user.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_contracts.records import Result, StoreAddress
from data_contracts.store import Store
from stages import runner
from tests.conftest import ROOT
from tests.containers.conftest import Site, give_away
from tests.containers.machine import Engine
from tests.stages.test_runner import statuses

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]
NO_SERVER = StoreAddress(tracking_uri="http://127.0.0.1:9", work_uri="/tmp/work")
IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}


@pytest.fixture(scope="module", autouse=True)
def without_server(engine: Engine, score_image: str, site: Site) -> Iterator[subprocess.Popen[str]]:
    """Start a container whose tracking server does not answer: it is patient for a minute, so the last test waits."""
    process = engine.start(score_image, site.request("/data", store=NO_SERVER), site.folder, "/data", IMPATIENT)
    yield process
    process.kill()


def test_the_digest_is_that_of_this_process_and_of_a_process_of_its_own(
    engine: Engine, score_image: str, site: Site, tmp_path: Path
) -> None:
    here = runner.run(site.request())
    file = tmp_path / "request.json"
    file.write_text(site.request(refresh=True).model_dump_json())
    done = subprocess.run(
        [sys.executable, "-m", "stages", "score", str(file)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    apart = Result.model_validate_json(done.stdout)
    give_away(site.folder)
    contained = engine.result(score_image, site.request("/data", refresh=True), site.folder, "/data")
    results = (here, apart, contained)
    assert len({result.run for result in results}) == 3
    assert not any(result.cached for result in results)
    assert len({result.identity for result in results}) == 1
    for output in ("scores", "quarantine"):
        assert len({result.refs[output].digest for result in results}) == 1


def test_a_container_with_another_mount_and_another_home_repeats_nothing(
    engine: Engine, score_image: str, site: Site
) -> None:
    """Finished here, adopted there; logged in container A, read in container B and here."""
    first = runner.run(site.request())
    give_away(site.folder)
    there = "/mnt/team/store"
    again = engine.result(score_image, site.request(there), site.folder, there, HOME="/tmp/another")
    assert (again.cached, again.run, again.refs) == (True, first.run, first.refs)

    config = {**site.workspace.config.slice("score"), "score": {"scorer": {"method": "perplexity"}}}
    a = engine.result(score_image, site.request("/a", config=config), site.folder, "/a", HOME="/tmp/a")
    assert not a.cached
    b = engine.result(
        score_image, site.request("/b", config=config, knobs={"root": "/b", "verify": True}), site.folder, "/b"
    )
    assert (b.cached, b.refs) == (True, a.refs)
    folder = Store(site.address).open(a.refs["scores"], verify=True)
    assert folder.is_relative_to(site.folder)


def test_a_refused_request_ends_with_2_and_says_why(engine: Engine, score_image: str, site: Site) -> None:
    code, out, err = engine.run(score_image, site.request("/data", config={"scroe": 1}), site.folder, "/data")
    assert (code, out) == (2, "")
    assert "did you mean 'score'" in err


def test_a_terminated_container_ends_with_143_and_the_next_one_finishes_its_work(
    engine: Engine, score_image: str, site: Site
) -> None:
    give_away(site.folder)
    work = site.folder / ".lazytrain" / "work"
    before = set(work.iterdir())
    config = {**site.workspace.config.slice("score"), "seed": 4321}
    process = engine.start(score_image, site.request("/data", config=config), site.folder, "/data")
    until = time.monotonic() + 60
    while not [path for new in set(work.iterdir()) - before for path in new.glob("claim-1/scratch")]:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    engine.podman("kill", "--signal", "TERM", process.name)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, ""), err
    assert "KILLED" in statuses(site.address)
    assert "RUNNING" not in statuses(site.address)
    result = engine.result(score_image, site.request("/data", config=config), site.folder, "/data")
    assert not result.cached


def test_a_container_can_be_stopped_before_its_work_began(engine: Engine, score_image: str, site: Site) -> None:
    """The first process of a container gets no signal that it did not ask for, so the stage asks before it loads."""
    request = site.request("/data", store=NO_SERVER)
    process = engine.start(score_image, request, site.folder, "/data", IMPATIENT)

    def asked() -> bool:
        pid = engine.podman("inspect", "--format", "{{.State.Pid}}", process.name, check=False).stdout.strip()
        place = Path(f"/proc/{pid or 0}")
        if not (place / "cmdline").exists() or b"stages" not in (place / "cmdline").read_bytes():
            return False  # not there yet, or still the runtime itself
        (caught,) = re.findall(r"SigCgt:\s*(\w+)", (place / "status").read_text())
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    until = time.monotonic() + 60
    while not asked():
        assert time.monotonic() < until, process.poll()
    began = time.monotonic()
    engine.podman("stop", "--time", "50", process.name)
    assert time.monotonic() - began < 40
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_the_image_is_thin_labelled_and_without_rights(engine: Engine, score_image: str) -> None:
    base = score_image.replace("lazytrain-score", "lazytrain-base")
    stage, shared = (json.loads(engine.podman("image", "inspect", name).stdout)[0] for name in (score_image, base))
    layers = shared["RootFS"]["Layers"]
    assert stage["RootFS"]["Layers"][: len(layers)] == layers
    assert stage["Size"] - shared["Size"] < 1_000_000
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    labels = stage["Labels"]
    assert labels["org.opencontainers.image.revision"].removesuffix("-changed") == head.stdout.strip()
    assert (labels["lazytrain.stage"], labels["lazytrain.device"]) == ("score", "cpu")
    assert stage["User"] == "10001"
    assert not stage["Config"].get("Entrypoint"), "a worker that starts containers sets only the command"
    code = (
        "import importlib.util, json, os; from importlib.metadata import version; import torch;"
        "print(json.dumps([os.getuid(), version('torch'), torch.version.cuda, torch.zeros(2).sum().item(),"
        "importlib.util.find_spec('prefect') is None, os.access('/app', os.W_OK), os.access('/opt/venv', os.W_OK)]))"
    )
    done = engine.podman("run", "--rm", "--read-only", score_image, "python", "-c", code)
    assert json.loads(done.stdout) == [10001, "2.13.0+cpu", None, 0.0, True, False, False]
    assert "compatible" in (told := engine.podman("run", "--rm", score_image, "uv", "pip", "check")).stderr, told


def test_a_changed_source_is_built_in_seconds_and_a_stage_may_have_packages_of_its_own(
    engine: Engine, score_image: str, tmp_path: Path
) -> None:
    for name in ("pyproject.toml", "requirements.lock", ".dockerignore"):
        shutil.copy2(ROOT / name, tmp_path / name)
    for name in ("containers", "stages", "data_contracts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "stages" / "stage.py").open("a") as source:
        source.write("\nCHANGED = True\n")
    began = time.monotonic()
    options = [*engine.build_options, "--tag", "changed", "--extras", "chatterbot-corpus", "score"]
    done = subprocess.run(
        [sys.executable, "containers/build.py", *options], cwd=tmp_path, env={**engine.env, "GIT_DIR": os.devnull},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert time.monotonic() - began < 60
    changed = done.stdout.split()[-1]
    code = "import chatterbot_corpus, stages.stage; print(stages.stage.CHANGED)"
    assert engine.podman("run", "--rm", "--read-only", changed, "python", "-c", code).stdout == "True\n"
    layers = [json.loads(engine.podman("image", "inspect", name).stdout)[0] for name in (score_image, changed)]
    dependencies = max(
        zip(*(item["RootFS"]["Layers"] for item in layers), strict=False), key=lambda pair: pair[0] == pair[1]
    )
    assert dependencies[0] == dependencies[1]
    assert layers[1]["Labels"]["org.opencontainers.image.revision"] == "unknown"


def test_a_server_that_does_not_answer_ends_the_container_with_3(without_server: subprocess.Popen[str]) -> None:
    out, err = without_server.communicate(timeout=240)
    assert (without_server.returncode, out) == (3, ""), err
    assert "run again: what was committed is kept" in err
