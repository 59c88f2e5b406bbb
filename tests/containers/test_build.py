"""`containers/build.py` says what it cannot do; the Dockerfiles are pinned. Needs no engine."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stages.stage import VERBS
from tests.conftest import ROOT

FILES = ROOT / "containers"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build", FILES / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_stage_can_be_built(build: ModuleType) -> None:
    assert build.STAGES == VERBS


def test_it_needs_nothing_but_python() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(FILES / "build.py"), "--help"], capture_output=True, text=True, check=True
    )
    for option in ("--prefect", "--device", "--mount", "--debootstrap", "--extras"):
        assert option in done.stdout


def test_an_unknown_stage_is_named_with_those_there_are(build: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    assert build.main(["scroe"]) == 1
    assert re.search(r"scroe; there are .*score", capfd.readouterr().err)


def test_a_machine_without_an_engine_is_told_what_to_install(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main(["score"]) == 1
    assert "none of buildah, podman, docker is installed" in capfd.readouterr().err
    assert build.main(["score", "--engine", "podman"]) == 1
    assert "podman is not installed" in capfd.readouterr().err


def test_a_failed_build_says_which_command_failed(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "docker"
    engine.write_text("#!/bin/sh\nexit 7\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert build.main(["score", "--engine", "docker"]) == 1
    assert re.search(r"localhost/lazytrain-base:\S+ failed: `docker build .*` returned 7", capfd.readouterr().err)
    assert build.main(["score", "--engine", "docker", "--mount", "/a:/b"]) == 1
    assert "use buildah or podman for --mount" in capfd.readouterr().err


@pytest.mark.parametrize(("device", "backend"), [("cpu", "cpu"), ("cuda", "")])
def test_the_variants_of_a_device_differ_by_arguments_alone(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    device: str, backend: str,
) -> None:  # fmt: skip
    engine = tmp_path / "docker"
    engine.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert build.main(["score", "--engine", "docker", "--device", device, "--tag", "1"]) == 0
    assert capfd.readouterr().out.split() == ["localhost/lazytrain-base:1", "localhost/lazytrain-score:1"]
    base, stage = (tmp_path / "asked").read_text().splitlines()
    assert f"--build-arg DEVICE={device} --build-arg TORCH_BACKEND={backend} " in base
    assert "--target base" in base
    assert "--build-arg BASE=localhost/lazytrain-base:1 --build-arg STAGE=score " in stage


def test_the_public_image_is_pinned_by_its_digest() -> None:
    (default,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", (FILES / "base.Dockerfile").read_text(), re.MULTILINE)
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", default)


def test_nothing_goes_into_a_build_that_was_not_named() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    assert [line for line in lines if line.startswith("!")] == [
        f"!{name}"
        for name in ("pyproject.toml", "requirements.lock", "README.md", "LICENSE", "data_contracts", "stages", "flows")
    ]
