"""`lazytrain doctor`: what this machine can do, what is missing, and what to do about it.

Nothing is downloaded and no accelerator is touched; torch is not imported. It ends with exit code 2 where something
that every run needs is missing.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from packaging.requirements import Requirement
from rich.text import Text

from data_contracts.errors import EXIT_REFUSED
from flows.command.model import PACKAGED, SMALL, models_home
from flows.command.screen import console
from flows.readable import size

app = typer.Typer(add_completion=False)

LEAST_PYTHON = (3, 11)
LEAST_MEMORY = 6 * 10**9
LEAST_DISK = 5 * 10**9
STYLES = {"ok": "green", "can wait": "yellow", "missing": "red"}


class Check(NamedTuple):
    """One finding: `state` is ok, can wait (only some uses need it) or missing."""

    what: str
    state: str
    found: str
    remedy: str = ""


@app.command()
def doctor(folder: Annotated[Path, typer.Option(help="Where runs are to be kept.")] = Path()) -> None:
    """Say what this machine can do, what is missing and what to do."""
    checks = list(examine(folder))
    for check in checks:
        console().print(
            Text(f"{check.state:<9}", style=STYLES[check.state]),
            Text(f"{check.what:<18} {check.found}"),
            soft_wrap=True,
        )
        if check.remedy:
            console().print(Text(f"{'':<10}{'':<18} → {check.remedy}"), soft_wrap=True)
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(EXIT_REFUSED)


def examine(folder: Path) -> Iterator[Check]:
    """Yield the findings about this Python, this machine and `folder`."""
    found = platform.python_version()
    enough = sys.version_info >= LEAST_PYTHON
    yield Check("Python", "ok" if enough else "missing", found, "" if enough else "install Python 3.11 or newer")
    yield from _packages()
    yield from _machine()
    yield _disk(folder)
    yield _writable(folder)
    yield _model()
    yield _text()
    server = os.environ.get("PREFECT_API_URL")
    yield Check("Prefect", "ok", server or "embedded: a server of its own for each command")


def _packages() -> Iterator[Check]:
    wanted = [Requirement(line) for line in requires("lazytrain") or ()] if _installed("lazytrain") else []
    if not wanted:
        yield Check("lazytrain", "missing", "this checkout is not installed", "pip install -e .")
        return
    wrong = []
    for need in wanted:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        have = _installed(need.name)
        if have is None or not need.specifier.contains(have, prereleases=True):
            wrong.append(f"{need} (found {have or 'none'})")
    yield Check(
        "packages",
        "missing" if wrong else "ok",
        "; ".join(wrong) or f"all of what lazytrain {version('lazytrain')} needs",
        "install lazytrain again into a virtual environment of its own" if wrong else "",
    )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _machine() -> Iterator[Check]:
    from stages.meter.machine import describe

    facts = describe()
    yield Check("system", "ok", str(facts["system"]))
    fast = "with fast bfloat16" if facts["fast_bfloat16"] else "float32 only at speed"
    yield Check("processor", "ok", f"{facts['cpu']}, {facts['cores']} cores for this process, {fast}")
    memory = int(facts["memory_bytes"])
    enough = memory >= LEAST_MEMORY
    yield Check(
        "memory",
        "ok" if enough else "can wait",
        f"{size(memory)}, {size(int(facts['memory_available_bytes']))} free now",
        "" if enough else f"the quick start needs {size(LEAST_MEMORY)}; for your own runs lower budget.peak_bytes",
    )
    for found in facts["accelerators"]:
        name = f"{found['name']}, {size(found['memory_bytes'])}, capability {found['capability']}"
        yield Check("accelerator", "ok", name)
    if not facts["accelerators"]:
        yield Check(
            "accelerator",
            "can wait",
            "no NVIDIA device: models up to a few hundred million parameters train here",
            "for larger ones run where a GPU is, with a torch built for it",
        )


def _disk(folder: Path) -> Check:
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(place).free
    enough = free >= LEAST_DISK
    return Check(
        "disk", "ok" if enough else "can wait", f"{size(free)} free at {place}",
        "" if enough else "checkpoints with their moments take three times the trained weights: make room",
    )  # fmt: skip


def _writable(folder: Path) -> Check:
    try:
        with tempfile.TemporaryDirectory(dir=folder if folder.is_dir() else folder.resolve().parent):
            return Check("folder", "ok", f"{folder.resolve()} can be written")
    except OSError as error:
        return Check("folder", "missing", f"{folder.resolve()}: {error.strerror}", "run in a folder of your own")


def _model() -> Check:
    file = models_home() / SMALL / Path(PACKAGED[SMALL].member).name
    if file.is_file():
        return Check("quick-start model", "ok", str(file.parent))
    return Check("quick-start model", "can wait", "not fetched yet", "lazytrain model pull")


def _text() -> Check:
    if find_spec("chatterbot_corpus"):
        return Check("quick-start text", "ok", f"chatterbot-corpus {_installed('chatterbot-corpus')}")
    return Check("quick-start text", "can wait", "not installed", "pip install 'lazytrain[quickstart]'")
