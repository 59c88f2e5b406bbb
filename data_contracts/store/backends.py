"""Where payloads lie: the interface, and the backend in place.

In place, the run's artifact folder is on a file system that this process sees; payloads are renamed into it and mapped
where they are. The other backend is in `uploading.py`. Neither validates: see `artifacts.py`.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from data_contracts.errors import ArtifactError
from data_contracts.records import MEASURED, Output
from data_contracts.store.paths import confined, relative


class Backend(Protocol):
    """The artifacts of one run."""

    def put_folder(self, folder: Path, name: str) -> None:
        """Make the files of `folder` the artifact folder `name`; `folder` may be gone afterwards."""

    def put(self, name: str, data: bytes) -> None:
        """Write one small file, whole or not at all."""

    def get(self, name: str) -> bytes:
        """Return one small file. Raises `ArtifactError` where it is not there."""

    def content(self, output: Output) -> Path:
        """Return a local folder that holds the content files of `output`, not verified."""

    def measured(self, output: Output) -> Path:
        """Return a local folder that holds the measured files of `output`, not verified."""

    def forget(self, output: Output) -> None:
        """Drop what is cached of `output`, if this backend caches."""

    def discard(self, names: Iterable[str]) -> None:
        """Remove artifact folders or files of an attempt that was not committed."""

    def listing(self) -> Iterable[tuple[str, int]]:
        """Yield (relative path, bytes) of every file there is."""

    def remove(self) -> None:
        """Remove every file of the run."""


def sync(path: Path) -> None:
    """Make a file or a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)  # mkstemp makes it private; an MLflow server of another user reads it
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync(path.parent)


class InPlace:
    """A run's artifact folder on this file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put_folder(self, folder: Path, name: str) -> None:
        place = self.folder / relative(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            shutil.rmtree(place)
        try:
            os.rename(folder, place)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            for source in sorted(folder.rglob("*")):  # not copytree: its error hides that the disk is full
                target = place / source.relative_to(folder)
                if source.is_file():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)
                    sync(target)
        sync(place.parent)

    def put(self, name: str, data: bytes) -> None:
        write_atomically(self.folder / relative(name), data)

    def get(self, name: str) -> bytes:
        try:
            return confined(self.folder, name).read_bytes()
        except OSError as error:
            raise absent(name, error) from error

    def content(self, output: Output) -> Path:
        return confined(self.folder, output.ref.path)

    def measured(self, output: Output) -> Path:
        return self.content(output) / MEASURED

    def forget(self, output: Output) -> None:
        """Nothing is cached."""

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            place = confined(self.folder, name)
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

    def listing(self) -> Iterable[tuple[str, int]]:
        for path in self.folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(self.folder).as_posix(), path.stat().st_size

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.parent.is_dir() and not any(self.folder.parent.iterdir()):
            self.folder.parent.rmdir()


def absent(name: str, error: Exception) -> ArtifactError:
    """Return the error of a file that is not there."""
    return ArtifactError(
        f"the artifact file {name} is there", f"it cannot be read: {error}", "re-run the stage that made it"
    )
