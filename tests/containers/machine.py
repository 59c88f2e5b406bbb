"""How this machine builds and runs containers without a Docker engine: podman and buildah as root, no bridge, no registry.

`environment` is what both need to work in a small virtual machine; `mounts` is what pip is configured with here, handed
into a build from the outside. Nothing of either is known to the Dockerfiles.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from data_contracts.records import Request, Result
from tests.conftest import ROOT

NEEDED = ("buildah", "podman", "runc", "debootstrap")
CONTAINERS_CONF = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
netns = "host"
pids_limit = 0
[engine]
runtime = "runc"
events_logger = "file"
"""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
USER = 10001


def missing() -> str:
    """Return what this machine lacks, empty where it can build and run containers."""
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install {' '.join(NEEDED)}"
    return "" if os.geteuid() == 0 else "not run as root"


def environment(folder: Path) -> dict[str, str]:
    """Return the environment for buildah and podman; `folder` keeps their configuration."""
    file = folder / "containers.conf"
    file.write_text(CONTAINERS_CONF, encoding="ascii")
    return {**os.environ, "BUILDAH_ISOLATION": "chroot", "CONTAINERS_CONF": str(file)}


def mounts(folder: Path) -> tuple[list[str], bool]:
    """Return `--mount` values that give a build what pip has here, and whether that has a CPU build of torch."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    pip = {line.partition("=")[0].rpartition(".")[2]: line.partition("=")[2].strip("'") for line in listed.splitlines()}
    wheels = [place for place in pip.get("find-links", "").split() if Path(place).is_dir()]
    uv = [f"native-tls = true\nfind-links = {json.dumps(wheels)}\n"]
    if index := pip.get("index-url"):
        uv.append(f"index-url = {json.dumps(index)}\n")
    keep = {name: pip[name] for name in ("index-url", "find-links") if name in pip}
    lines = [f"{name} = {value}\n" for name, value in {**keep, "cert": CERTIFICATES}.items()]
    (folder / "uv.toml").write_text("".join(uv), encoding="utf-8")
    (folder / "pip.conf").write_text("[global]\n" + "".join(lines), encoding="utf-8")
    bundle = pip.get("cert") or os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    found = [f"{folder / 'uv.toml'}:/etc/uv/uv.toml:ro", f"{folder / 'pip.conf'}:/etc/pip.conf:ro"]
    found += [f"{bundle}:{CERTIFICATES}:ro"] if bundle else []
    found += [f"{place}:{place}:ro" for place in wheels]
    return found, any(list(Path(place).glob("torch-*+cpu*.whl")) for place in wheels)


class Container(subprocess.Popen[str]):
    """A container in the foreground, and its name."""

    name = ""


@dataclass
class Engine:
    """The engine of this machine, and the images that were built with it."""

    env: dict[str, str]
    build_options: list[str]
    folder: Path

    def build(self, *arguments: str) -> list[str]:
        """Run `containers/build.py` as a user would and return the images it names."""
        with FileLock(
            Path(tempfile.gettempdir()) / "lazytrain-containers.lock"
        ):  # two at once would make a layer twice
            done = subprocess.run(
                [sys.executable, str(ROOT / "containers" / "build.py"), *self.build_options, *arguments],
                env=self.env, capture_output=True, text=True, check=False,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr[-6000:]
        return done.stdout.split()

    def podman(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run podman."""
        done = subprocess.run(["podman", *arguments], env=self.env, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"podman {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done

    def start(
        self, image: str, request: Request, workspace: Path, at: str, env: Mapping[str, str] | None = None
    ) -> Container:
        """Start a stage's container: read-only, no capabilities, the workspace mounted at `at`."""
        file = self.folder / f"request-{time.monotonic_ns()}.json"
        file.write_text(request.model_dump_json(), encoding="utf-8")
        given = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LAZYTRAIN_MODELS": at, **(env or {})}
        command = ["podman", "run", "--rm", "--name", file.stem, "--read-only", "--tmpfs", "/tmp", "--cap-drop=all"]
        command += ["--security-opt=no-new-privileges", "-v", f"{workspace}:{at}", "-v", f"{file}:/request.json:ro"]
        command += [part for name, value in given.items() for part in ("-e", f"{name}={value}")]
        process = Container([*command, image], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.name = file.stem
        return process

    def run(
        self, image: str, request: Request, workspace: Path, at: str, env: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Run a stage's container to its end and return exit code, standard output and error."""
        process = self.start(image, request, workspace, at, env)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    def result(self, image: str, request: Request, workspace: Path, at: str, **env: str) -> Result:
        """Run a stage's container that must succeed and return its result."""
        code, out, err = self.run(image, request, workspace, at, env)
        assert code == 0, err
        return Result.model_validate_json(out)
