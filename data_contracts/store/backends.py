"""Where payloads lie: two backends, one interface.

In place: the run's artifact folder is on a file system that this process sees; payloads are renamed into it and mapped
where they are. Uploading: the artifacts are behind a server or an object store; payloads are uploaded and read through
a bounded local cache, keyed by digest, least recently used out first. Neither validates: see `artifacts.py`.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from filelock import FileLock

from data_contracts.errors import ArtifactError, TransientError
from data_contracts.records import MEASURED, FileEntry, Output
from data_contracts.store.paths import confined, relative
from data_contracts.store.tracking import Tracking, local_path

GRACE_SECONDS = 600.0  # an entry used this recently may be about to be read by a stage: it is not evicted


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
            raise _absent(name, error) from error

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


class Uploading:
    """A run's artifacts behind a server or in an object store."""

    def __init__(self, tracking: Tracking, run: str, cache: Path, bound_bytes: int) -> None:
        self._tracking, self._run, self._cache, self._bound = tracking, run, cache, bound_bytes

    def put_folder(self, folder: Path, name: str) -> None:
        relative(name)
        self._tracking.do(lambda client: client.log_artifacts(self._run, str(folder), artifact_path=name))
        found = dict(self._sizes(name))
        for path in folder.rglob("*"):
            inside = f"{name}/{path.relative_to(folder).as_posix()}"
            if path.is_file() and found.get(inside) != path.stat().st_size:
                raise ArtifactError(
                    f"the artifact store holds {inside} whole",
                    f"it lists {found.get(inside)} of {path.stat().st_size} bytes after the upload",
                    "see that the store has space and may be written, then run again",
                )

    def listing(self) -> Iterable[tuple[str, int]]:
        return self._sizes(None)

    def remove(self) -> None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        uri = self._tracking.do(lambda client: client.get_run(self._run)).info.artifact_uri
        repository = get_artifact_repository(uri, tracking_uri=self._tracking.address.tracking_uri)
        for item in self._tracking.do(lambda client: client.list_artifacts(self._run)):
            self._tracking.do(lambda _, item=item: repository.delete_artifacts(item.path))  # type: ignore[misc]

    def _sizes(self, folder: str | None) -> Iterable[tuple[str, int]]:
        for item in self._tracking.do(lambda client: client.list_artifacts(self._run, folder)):
            if item.is_dir:
                yield from self._sizes(item.path)
            else:
                yield item.path, item.file_size or 0

    def put(self, name: str, data: bytes) -> None:
        path = relative(name)
        parent = path.parent.as_posix()
        with tempfile.TemporaryDirectory() as place:
            local = Path(place) / path.name
            local.write_bytes(data)
            self._tracking.do(
                lambda client: client.log_artifact(self._run, str(local), None if parent == "." else parent)
            )

    def get(self, name: str) -> bytes:
        with tempfile.TemporaryDirectory() as place:
            return self._download(name, Path(place)).read_bytes()

    def _download(self, name: str, place: Path) -> Path:
        relative(name)
        try:
            return Path(self._tracking.do(lambda client: client.download_artifacts(self._run, name, str(place))))
        except TransientError:
            raise
        except Exception as error:  # MLflow raises a different class for each kind of store
            raise _absent(name, error) from error

    def content(self, output: Output) -> Path:
        return self._cached(output.ref.digest, output, output.content)

    def measured(self, output: Output) -> Path:
        return self._cached(f"{output.ref.digest}-{self._run}", output, output.measured) / MEASURED

    def forget(self, output: Output) -> None:
        """Drop the cached copy of `output`: it was found bad."""
        for key in (output.ref.digest, f"{output.ref.digest}-{self._run}"):
            shutil.rmtree(self._cache / key, ignore_errors=True)

    def _cached(self, key: str, output: Output, files: Iterable[FileEntry]) -> Path:
        place = self._cache / key
        self._cache.mkdir(parents=True, exist_ok=True)
        with FileLock(str(self._cache / f"{key}.lock")):
            if not place.is_dir():
                with tempfile.TemporaryDirectory(dir=self._cache, prefix=".arriving-") as arriving:
                    for entry in files:
                        target = Path(arriving) / "payload" / relative(entry.path)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        found = self._download(f"{output.ref.path}/{entry.path}", Path(arriving) / "raw")
                        os.replace(found, target)
                    (Path(arriving) / "payload").mkdir(exist_ok=True)
                    os.replace(Path(arriving) / "payload", place)
            os.utime(place)
        self._evict(keep=place)
        return place

    def _evict(self, keep: Path) -> None:
        places = [place for place in self._cache.iterdir() if place.is_dir() and not place.name.startswith(".")]
        ages = sorted((place.stat().st_mtime, place) for place in places)
        sizes = {place: sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) for place in places}
        total = sum(sizes.values())
        for used, place in ages:
            if total <= self._bound:
                return
            if place != keep and time.time() - used > GRACE_SECONDS:
                shutil.rmtree(place, ignore_errors=True)
                total -= sizes[place]

    def discard(self, names: Iterable[str]) -> None:
        """Leave what was uploaded: without a commit nothing refers to it (object stores may forbid deletion)."""


def _absent(name: str, error: Exception) -> ArtifactError:
    return ArtifactError(
        f"the artifact file {name} is there", f"it cannot be read: {error}", "re-run the stage that made it"
    )


def backend_of(tracking: Tracking, run: str, artifact_uri: str, cache: Path, bound_bytes: int) -> InPlace | Uploading:
    """Return the backend of `run`: in place where `artifact_uri` names a folder, else uploading.

    A store that was moved, or is mounted elsewhere in a container, is found again below the address's artifact root.
    """
    folder = local_path(artifact_uri)
    if folder is None:
        return Uploading(tracking, run, cache, bound_bytes)
    root = local_path(root_uri) if (root_uri := tracking.root()) else None
    if root is not None and not folder.parent.parent.is_dir():
        folder = root / run / "artifacts"
    return InPlace(folder)
