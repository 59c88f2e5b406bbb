"""Payloads behind a server or in an object store: uploaded, and read through a bounded local cache.

The cache is keyed by digest; what was used longest ago goes first. `backend_of` tells which backend a run has.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock

from data_contracts.errors import ArtifactError, TransientError
from data_contracts.records import MEASURED, FileEntry, Output
from data_contracts.store.backends import InPlace, absent
from data_contracts.store.paths import relative
from data_contracts.store.tracking import Tracking, local_path

GRACE_SECONDS = 600.0  # an entry used this recently may be about to be read by a stage: it is not evicted


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
            raise absent(name, error) from error

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
