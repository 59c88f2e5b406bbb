"""What no run refers to any more: found without a guess, removed under a check.

Kept is what a pipeline run noted, what a registered model was made from, what an attempt outside any pipeline run
committed, and everything that these descend from; and whatever is at work. A pipeline run that was deleted in MLflow
refers to nothing. The rest may go: artifacts of failed attempts and of deleted runs, work folders of finished, deleted
or long dead attempts, cached copies of what is gone, and folders that belong to no run.

Removal is safe beside runs at work. A commit is withdrawn first (deleted in MLflow), then the notes are read again: an
adopter notes first and looks for a withdrawal afterwards (`stages/runner.py`), so one of the two sees the other. A work
folder is removed under the lease of its identity.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data_contracts.cost import Frozen
from data_contracts.errors import ArtifactError
from data_contracts.records import Ref
from data_contracts.store.attempts import IDENTITY, MANIFEST, PARENT, STAGE
from data_contracts.store.folders import discard, size_of, untouched_seconds
from data_contracts.store.lease import KIND, Lease, State, claim
from data_contracts.store.process import this_process
from data_contracts.store.registry import CHECKPOINT_TAG
from data_contracts.store.rows import noted_in
from data_contracts.store.tracking import local_path
from data_contracts.store.uploading import GRACE_SECONDS

if TYPE_CHECKING:
    from data_contracts.store import Store

SILENT_SECONDS = 3600.0
"""A claim of another host whose attempt is closed and whose work folder was untouched for so long is dead."""

KEPT = ("RUNNING", "FINISHED")
Kind = Literal["failed attempt", "deleted run", "work", "cache", "no run"]


class Rubbish(Frozen):
    """One thing that may go."""

    kind: Kind
    name: str
    """Run id, or the name of a folder."""
    why: str
    bytes: int


class Garbage:
    """What may go from a store.

    Args:
        store: the store, reconciled.
        unfinished_seconds: work of attempts that ended without a commit is kept so long, to be resumed.
    """

    def __init__(self, store: Store, unfinished_seconds: float) -> None:
        self._store, self._attempts = store, store._attempts
        self._tracking, self._coordination = store._tracking, store._coordination
        self._unfinished = unfinished_seconds
        self._look()

    def _look(self) -> None:
        """Read every run of the experiment, deleted ones too, and what the kept ones refer to."""
        self._runs = {item.info.run_id: item for item in self._attempts.search("", deleted=True)}
        self._active = {run for run, item in self._runs.items() if item.info.lifecycle_stage == "active"}
        self._commits: dict[tuple[str, str], set[str]] = {}
        roots = set(self._registered())
        for item in self._attempts.search("", everywhere=True):  # a commit is adopted from any experiment
            kind = item.data.tags.get(KIND)
            if kind == "pipeline":
                roots.update(noted.run for noted in noted_in(item.data.params))
            elif kind == "attempt" and item.info.status in KEPT and self._parent(item) not in self._deleted:
                roots.add(item.info.run_id)
        self._kept, self.unreadable = self._descent(roots)

    @property
    def _deleted(self) -> set[str]:
        return self._runs.keys() - self._active

    def _kind(self, run: str) -> str:
        return str(self._runs[run].data.tags.get(KIND, ""))

    @staticmethod
    def _parent(item: Any) -> str:
        return str(item.data.tags.get(PARENT, ""))

    def _registered(self) -> Iterator[str]:
        for version in self._store.registry().versions():
            text = version.tags.get(CHECKPOINT_TAG)
            yield Ref.model_validate_json(text).run if text else version.run_id

    def _descent(self, roots: Iterable[str]) -> tuple[set[str], list[str]]:
        """Return all attempts that `roots` descend from, and those whose manifest cannot be read."""
        waiting, seen, unreadable = list(roots), set[str](), []
        while waiting:
            run = waiting.pop()
            if run in seen or not run:
                continue
            seen.add(run)
            try:
                manifest = self._store.read_manifest(run)
            except ArtifactError:
                if self._committed_something(run):
                    unreadable.append(run)
                continue
            waiting.extend(ref.run for refs in manifest.inputs.values() for ref in refs)
        return seen, unreadable

    def _committed_something(self, run: str) -> bool:
        return not self._known(run) or MANIFEST in self._attempts.get(run).data.params

    def find(self) -> list[Rubbish]:
        """Return everything that may go."""
        return [*self._of_runs(), *self._of_work(), *self._of_cache(), *self._of_no_run()]

    def _of_runs(self) -> Iterator[Rubbish]:
        for run, item in self._runs.items():
            size = self._size(run) if run not in self._kept and item.info.status != "RUNNING" else 0
            if not size:
                continue
            if run in self._active and self._kind(run) == "attempt" and item.info.status in ("FAILED", "KILLED"):
                if not self._committed(item, run):
                    yield Rubbish(kind="failed attempt", name=run, why="it committed nothing", bytes=size)
            elif self._gone_with_its_run(run) and not self.unreadable:
                yield Rubbish(kind="deleted run", name=run, why="its run was deleted in MLflow", bytes=size)

    def _gone_with_its_run(self, run: str) -> bool:
        return run in self._deleted or self._parent(self._runs[run]) in self._deleted

    def _committed(self, item: Any, run: str) -> bool:
        stage, identity = item.data.tags.get(STAGE), item.data.tags.get(IDENTITY)
        if (stage, identity) not in self._commits:
            state = self._coordination.state(stage, identity)
            self._commits[stage, identity] = {commit.run for commit in state.commits}
        return run in self._commits[stage, identity]

    def _size(self, run: str) -> int:
        return sum(size for _, size in self._store._backend(run).listing())

    def _of_work(self) -> Iterator[Rubbish]:
        for place in self._work_folders():
            identity, _, alone = place.name.partition(".")
            why = self._why_alone(alone) if alone else self._why_work(identity, place)
            if why:
                yield Rubbish(kind="work", name=place.name, why=why, bytes=size_of(place))

    def _work_folders(self) -> list[Path]:
        return sorted(place for place in self._store.work.glob("[0-9a-f]*") if len(place.name.partition(".")[0]) == 64)

    def _why_alone(self, attempt: str) -> str:
        item = self._runs.get(attempt)
        return "" if item is not None and item.info.status == "RUNNING" else "its attempt has ended"

    def _why_work(self, identity: str, place: Path) -> str:
        """Return why the work folder of `identity` may go, empty where it may not."""
        items = [item for item in self._runs.values() if item.data.tags.get(IDENTITY) == identity]
        idle = untouched_seconds(place)
        if any(item.info.status == "RUNNING" for item in items):
            return ""
        if any(_at_work(state, idle) for _, state in self._coordination.every(identity)):
            return ""
        if any(item.info.status == "FINISHED" for item in items):
            return "its work was committed"
        if items and all(self._gone_with_its_run(item.info.run_id) for item in items):
            return "its run was deleted in MLflow"
        return f"unfinished and untouched for {idle / 86400:.1f} days" if idle > self._unfinished else ""

    def _of_cache(self) -> Iterator[Rubbish]:
        digests: set[str] = set()
        for run in self._kept - set(self.unreadable):
            if run in self._runs and self._runs[run].info.status != "RUNNING":
                digests.update(output.ref.digest for output in self._store.read_manifest(run).outputs.values())
        for place in sorted((self._store.work / "cache").glob("*")):
            if place.is_dir() and _idle(place) and place.name.partition("-")[0] not in digests:
                yield Rubbish(
                    kind="cache", name=place.name, why="a copy of what no run refers to", bytes=size_of(place)
                )

    def _of_no_run(self) -> Iterator[Rubbish]:
        root = local_path(self._tracking.root() or "mlflow-artifacts:/")
        for place in sorted(root.glob("[0-9a-f]*")) if root is not None else ():
            if len(place.name) == 32 and place.name not in self._runs and _idle(place) and not self._known(place.name):
                yield Rubbish(kind="no run", name=place.name, why="MLflow knows no such run", bytes=size_of(place))

    def _known(self, run: str) -> bool:
        try:
            self._attempts.get(run)
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return True

    def remove(self, found: Iterable[Rubbish]) -> list[Rubbish]:
        """Remove what `find` found, as far as it still may go, and return what went."""
        found = list(found)
        commits = [item.name for item in found if item.kind == "deleted run" and item.name in self._active]
        for run in commits:
            self._tracking.do(lambda client, run=run: client.delete_run(run))  # type: ignore[misc]
        self._look()  # who adopted one of them before it was withdrawn has noted it by now, or will see that it is gone
        for run in commits:
            if run in self._kept:
                self._tracking.do(lambda client, run=run: client.restore_run(run))  # type: ignore[misc]
        return [item for item in found if self._remove(item)]

    def _remove(self, item: Rubbish) -> bool:
        if item.kind in ("failed attempt", "deleted run"):
            if item.name in self._kept:
                return False
            self._store._backend(item.name).remove()
            return True
        if item.kind == "work":
            return self._remove_work(item.name)
        folder = self._store.work / "cache" if item.kind == "cache" else local_path(self._tracking.root() or "")
        if folder is None or not _idle(folder / item.name):
            return False
        shutil.rmtree(folder / item.name, ignore_errors=True)
        return True

    def _remove_work(self, name: str) -> bool:
        identity, _, alone = name.partition(".")
        place = self._store.work / name
        if alone:
            discard(place)
            return True
        leases: list[Lease] = []
        try:
            for stage, state in self._coordination.every(identity):
                if _at_work(state, untouched_seconds(place)):
                    return False
                lease = claim(self._coordination, stage, identity, state.next)
                if lease is None:  # someone began to work on it just now
                    return False
                leases.append(lease)
            discard(place)
            return True
        finally:
            for lease in leases:
                lease.release("gc")


def _at_work(state: State, idle_seconds: float) -> bool:
    if state.held is None or state.held[1].process.gone():
        return False
    return state.held[1].process.place == this_process().place or idle_seconds < SILENT_SECONDS


def _idle(place: Path) -> bool:
    return place.exists() and time.time() - place.stat().st_mtime > GRACE_SECONDS
