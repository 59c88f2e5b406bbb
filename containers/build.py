"""Builds the images: the shared base, the one with Prefect and `flows`, and one a stage, with whichever engine is here.

    python containers/build.py                      all of them, for CPU
    python containers/build.py score train          these two and the base below them
    python containers/build.py --prefect score      as a Prefect worker starts it

Needs Python alone, and buildah, podman or docker. Where no registry is reached, `--debootstrap` makes the image to
start from out of Debian's archive. A package index of yours, its certificates and local wheels are mounted into the
build with `--mount` and leave no trace in a Dockerfile. How the images are run: `docs/containers.md`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("buildah", "podman", "docker")
STAGES = (
    "ingest",
    "plan",
    "begin",
    "score",
    "mix",
    "select",
    "train",
    "govern",
    "weigh",
    "quote",
    "evaluate",
    "judge",
    "promote",
)
DEBIAN = "localhost/lazytrain-debian:bookworm"
MIRROR = "http://deb.debian.org/debian"


class BuildError(Exception):
    """An image cannot be built, and why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what is asked for and return the exit code."""
    given = parser().parse_args(arguments)
    try:
        for image in build(given):
            sys.stdout.write(f"{image}\n")
    except BuildError as error:
        sys.stderr.write(f"build.py: {error}\n")
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("stages", nargs="*", metavar="STAGE", help=f"default: all of {', '.join(STAGES)}")
    command.add_argument("--prefect", action="store_true", help="on top of Prefect and flows; names end in -flows")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="the build of torch; default: cpu")
    command.add_argument("--torch-backend", help="uv's --torch-backend; '' takes what the package index has")
    command.add_argument("--extras", default="", help="further packages for these stages, such as methods of yours")
    command.add_argument("--base-image", help="the image to start from: Debian with Python 3.11; see base.Dockerfile")
    command.add_argument("--debootstrap", action="store_true", help="make the image to start from; needs root")
    command.add_argument("--mirror", default=MIRROR, help=f"Debian's archive for --debootstrap; default: {MIRROR}")
    command.add_argument("--mount", action="append", default=[], metavar="HERE:THERE", help="seen by the build only")
    command.add_argument("--tag", help="default: the product's version")
    command.add_argument("--registry", default="localhost", help="before the names; default: localhost")
    command.add_argument("--engine", choices=ENGINES, help="default: the first of these that is installed")
    return command


def build(given: argparse.Namespace) -> list[str]:
    """Build base and stages and return the images' names. Raises `BuildError`."""
    unknown = sorted(set(given.stages) - set(STAGES))
    if unknown:
        raise BuildError(f"no stage is called {', '.join(unknown)}; there are {', '.join(STAGES)}")
    engine = find_engine(given.engine)
    tag = given.tag or tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    backend = given.torch_backend
    if backend is None:
        backend = "cpu" if given.device == "cpu" else ""
    base_image = debian(engine, given.mirror) if given.debootstrap else given.base_image
    target = "flows" if given.prefect else "base"
    shared = f"{given.registry}/lazytrain-{target}:{tag}"
    options = {"DEVICE": given.device, "TORCH_BACKEND": backend, "COMMIT": commit()}
    if base_image:
        options["BASE_IMAGE"] = base_image
    image(engine, shared, "base.Dockerfile", options, given.mount, target)
    made = [shared]
    for stage in given.stages or STAGES:
        name = f"{given.registry}/lazytrain-{stage}{'-flows' if given.prefect else ''}:{tag}"
        options = {"BASE": shared, "STAGE": stage, "EXTRAS": given.extras, "COMMIT": commit()}
        image(engine, name, "stage.Dockerfile", options, given.mount)
        made.append(name)
    return made


def find_engine(wanted: str | None) -> str:
    """Return the engine to use. Raises `BuildError` where there is none."""
    for engine in (wanted,) if wanted else ENGINES:
        if shutil.which(engine):
            return engine
    found = f"{wanted} is not installed" if wanted else f"none of {', '.join(ENGINES)} is installed"
    raise BuildError(f"{found}; on Debian: apt install buildah podman")


def image(
    engine: str, name: str, file: str, options: dict[str, str], mounts: Sequence[str], target: str | None = None
) -> None:
    """Build one image from a file beside this one; the engine's own steps are the progress."""
    command = [engine, "bud" if engine == "buildah" else "build"]
    command += ["--file", str(ROOT / "containers" / file), "--tag", name]
    command += [part for key, value in options.items() for part in ("--build-arg", f"{key}={value}")]
    if target:
        command += ["--target", target]
    if engine == "docker":
        if mounts:
            raise BuildError("docker mounts nothing into a build: use buildah or podman for --mount")
    else:
        command += ["--layers", *(part for mount in mounts for part in ("--volume", mount))]
    run([*command, str(ROOT)], name)


def debian(engine: str, mirror: str) -> str:
    """Return the image to start from, made from Debian's archive where it is not here yet."""
    known = [engine, "inspect", "--type", "image", DEBIAN]
    if subprocess.run(known, capture_output=True, check=False).returncode == 0:
        return DEBIAN
    if not shutil.which("debootstrap"):
        raise BuildError("debootstrap is not installed; on Debian: apt install debootstrap")
    with tempfile.TemporaryDirectory(prefix="lazytrain-debian-") as folder:
        system = Path(folder) / "system"
        packages = "--include=ca-certificates,python3,python3-venv"
        run(["debootstrap", "--variant=minbase", packages, "bookworm", str(system), mirror], "Debian bookworm")
        for left in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(system / left)
        run(["tar", "-C", str(system), "-cf", str(Path(folder) / "system.tar"), "."], "its files")
        shutil.rmtree(system)
        (Path(folder) / "Dockerfile").write_text("FROM scratch\nADD system.tar /\n", encoding="ascii")
        run([engine, "bud" if engine == "buildah" else "build", "--tag", DEBIAN, folder], DEBIAN)
    return DEBIAN


def commit() -> str:
    """Return the checkout's commit, marked where files differ from it; "unknown" outside a checkout."""
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}{'-changed' if changes else ''}"


def run(command: Sequence[str], what: str) -> None:
    """Run a command with its output on standard error. Raises `BuildError` where it fails."""
    sys.stderr.write(f"== {what}\n")
    sys.stderr.flush()
    started = time.monotonic()
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise BuildError(f"{what} failed: `{' '.join(command)}` returned {done.returncode}; its output is above")
    sys.stderr.write(f"== {what}: {time.monotonic() - started:.0f} s\n")


if __name__ == "__main__":
    sys.exit(main())
