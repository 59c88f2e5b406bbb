"""The door to MLflow: one client for one tracking server, every call retried while the cause is passing.

Promises that the schema of an SQLite file is made once, under a file lock, so that many processes may start on a cold
one; that a lock, a reset connection or a busy server is tried again before it becomes a `TransientError`; and that a
write-once value is won by exactly one caller. Importing this file does not import mlflow.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlparse

import tenacity
from filelock import FileLock

from data_contracts.errors import ArtifactError, TransientError
from data_contracts.records import StoreAddress

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
_PASSING = (
    "database is locked",
    "database table is locked",
    "connection refused",
    "connection reset",
    "connection aborted",
    "max retries exceeded",
    "timed out",
    "temporarily unavailable",
)
_UNWRITABLE = ("disk is full", "readonly database", "unable to open database", "disk i/o error")
_DENIED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.EEXIST, errno.ENOTDIR),  # a file stands where the folder would be
)
_PASSING_CODES = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED")
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # read at import
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is a stage's Result, and nothing else
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # its 7 hide a server's fault for minutes; `do` tries again by itself
}
_opening = threading.Lock()
_clients: dict[str, MlflowClient] = {}


def local_path(uri: str) -> Path | None:
    """Return the folder of a plain path or a `file:` URI, None for anything elsewhere."""
    parsed = urlparse(uri)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    return Path(uri) if parsed.scheme == "" else None


def _sqlite_file(uri: str) -> Path | None:
    parsed = urlparse(uri)
    return Path(unquote(parsed.path[1:])) if parsed.scheme.startswith("sqlite") and parsed.path[1:] else None


def _marker(file: Path) -> Path:
    return file.with_name(f"{file.name}.ready")


def _tables(file: Path, version: str) -> str:
    return f"{version} {file.stat().st_ino}"


def _ready(file: Path, version: str) -> bool:
    """Return whether the tables of this very file were made for this version of MLflow."""
    try:
        return _marker(file).read_text(encoding="ascii") == _tables(file, version)
    except OSError:
        return False


def _unwritable(error: BaseException) -> bool:
    text = str(error).lower()
    return (isinstance(error, OSError) and error.errno in _DENIED) or any(sign in text for sign in _UNWRITABLE)


def _passing(error: BaseException) -> bool:
    text = str(error).lower()
    return not _unwritable(error) and (
        isinstance(error, (ConnectionError, TimeoutError))
        or getattr(error, "error_code", None) in _PASSING_CODES
        or any(sign in text for sign in _PASSING)
    )


def _client(uri: str) -> MlflowClient:
    with _opening:
        if uri not in _clients:
            for name, value in _QUIET.items():
                os.environ.setdefault(name, value)
            import mlflow

            # What it logs with a traceback is raised too, and tried again or told by `Tracking`.
            logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
            file = _sqlite_file(uri)
            if file is not None and not _ready(file, mlflow.__version__):
                file.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(f"{file}.lock"):  # making a client makes the tables: two at once break the migration
                    if not _ready(file, mlflow.__version__):
                        mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)
                        _marker(file).write_text(_tables(file, mlflow.__version__), encoding="ascii")
            client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
            _clients[uri] = client
        return _clients[uri]


class Tracking:
    """A tracking server as the store uses it."""

    def __init__(self, address: StoreAddress) -> None:
        self.address = address
        self._experiments: dict[str, str] = {}
        self._client = self._try(lambda: _client(address.tracking_uri))

    def do(self, call: Callable[[MlflowClient], T]) -> T:
        """Return `call(client)`, tried again for a minute while what fails is passing; then `TransientError`."""
        return self._try(lambda: call(self._client))

    def _try(self, call: Callable[[], T]) -> T:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_passing),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=3),
            stop=tenacity.stop_after_delay(PATIENCE_SECONDS),
            reraise=True,
        )
        try:
            return retrying(call)
        except Exception as error:
            if _unwritable(error):
                raise ArtifactError(
                    f"the database {self._shown()} can be written",
                    str(error).strip().splitlines()[0],
                    "free space or mend permissions there, or set `store.home`",
                ) from error
            if not _passing(error):
                raise
            raise TransientError(
                f"the tracking server {self._shown()} answers",
                f"{type(error).__name__}: {str(error)[:300]}",
                "see that it runs and is reachable, then run again: what was committed is kept",
            ) from error

    def _shown(self) -> str:
        file = _sqlite_file(self.address.tracking_uri)
        if file is not None:
            return str(file)
        parsed = urlparse(self.address.tracking_uri)
        return parsed._replace(netloc=parsed.netloc.rpartition("@")[2]).geturl()

    def experiment(self, name: str, tags: dict[str, str] | None = None) -> str:
        """Return the id of experiment `name`, made with `tags` where it is not there; racing creators agree."""
        if name not in self._experiments:
            found = self.do(lambda client: client.get_experiment_by_name(name))
            if found is None:
                try:
                    made = self.do(
                        lambda client: client.create_experiment(name, artifact_location=self.root(), tags=tags)
                    )
                except Exception as error:
                    found = self.do(lambda client: client.get_experiment_by_name(name))
                    if found is None:
                        raise error
                else:
                    self._experiments[name] = made
                    return made
            if found.lifecycle_stage != "active":
                raise ArtifactError(
                    f"the experiment {name!r} is there",
                    "it was deleted",
                    f"`mlflow experiments restore -x {found.experiment_id}`",
                )
            self._experiments[name] = found.experiment_id
        return self._experiments[name]

    def experiments(self) -> list[str]:
        """Return the ids of every experiment of the server."""
        found: list[str] = []
        token: str | None = None
        while True:
            page: Any = self.do(lambda client, token=token: client.search_experiments(page_token=token))  # type: ignore[misc]
            found.extend(item.experiment_id for item in page)
            token = page.token
            if not token:
                return found

    def experiment_tag(self, name: str, key: str) -> str | None:
        """Return a tag of experiment `name`, None where either is not there."""
        found = self.do(lambda client: client.get_experiment_by_name(name))
        return found.tags.get(key) if found is not None else None

    def root(self) -> str | None:
        """Return the artifact root of a new experiment: as addressed; beside an SQLite file; else the server's own."""
        if self.address.artifact_uri is not None:
            local = local_path(self.address.artifact_uri)
            return local.resolve().as_uri() if local is not None else self.address.artifact_uri
        file = _sqlite_file(self.address.tracking_uri)
        return (file.resolve().parent / "artifacts").as_uri() if file is not None else None

    def params(self, run: str) -> dict[str, str]:
        """Return the params of `run`."""
        return dict(self.do(lambda client: client.get_run(run)).data.params)

    def once(self, run: str, key: str, value: str) -> str:
        """Write param `key` of `run` once and return what it holds: `value` for the one caller that won."""
        try:
            self.do(lambda client: client.log_param(run, key, value))
        except TransientError:
            raise
        except Exception as error:
            held = self.params(run).get(key)
            if held is None:
                raise error
            return held
        return value

    def tag(self, run: str, tags: dict[str, Any]) -> None:
        """Set tags of `run` in one transaction."""
        from mlflow.entities import RunTag

        entities = [RunTag(key, str(value)) for key, value in tags.items()]
        self.do(lambda client: client.log_batch(run, tags=entities))

    def untag(self, run: str, key: str) -> None:
        """Remove a tag of `run`, if it is there."""
        if key in self.do(lambda client: client.get_run(run)).data.tags:
            self.do(lambda client: client.delete_tag(run, key))
