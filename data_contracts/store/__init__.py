"""The store: what was committed, who is at work, what was registered; the only door to MLflow.

Promises commit or nothing, verified reads and one commit an identity (see `artifacts`, `lease`); run states that are
true (`attempts`); an alias that moves only under a check (`registry`). What the stages compute is left to them, when to
run them to the runner. Importing this package does not import mlflow; making a `Store` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from data_contracts.cost import Cost
from data_contracts.errors import ArtifactError
from data_contracts.records import MANIFEST_FILE, Manifest, Origin, Output, Result, StoreAddress, Summary, contract_of
from data_contracts.store import artifacts
from data_contracts.store.attempts import Attempts
from data_contracts.store.folders import discard
from data_contracts.store.garbage import Garbage
from data_contracts.store.heartbeat import HEARTBEAT, Heartbeat, stamp
from data_contracts.store.lease import Claim, Lease, State, acquire
from data_contracts.store.reader import CACHE_BYTES, Reader
from data_contracts.store.registry import ModelRegistry
from data_contracts.store.rows import AttemptRow, RunRow, merged
from data_contracts.store.zombies import close_lost, close_superseded

__all__ = ["AttemptRow", "Lease", "RunRow", "Store"]

CONFIG_FILE, SUMMARY_FILE = "config.json", "summary.json"


class Store(Reader):
    """The store at one address.

    Args:
        address: tracking server, work folder, experiment and (for a new local one) artifact root.
        cache_bytes: bound of the local cache of artifacts that lie elsewhere.

    Raises `TransientError` where the tracking server does not answer.
    """

    def __init__(self, address: StoreAddress, *, cache_bytes: int = CACHE_BYTES) -> None:
        super().__init__(address, cache_bytes=cache_bytes)
        self._attempts = Attempts(self._tracking)
        self._beats: dict[str, Heartbeat] = {}

    @property
    def artifact_root(self) -> str:
        """Where a new local experiment keeps its artifacts, for messages."""
        return self._tracking.root() or f"the artifacts of {self.address.tracking_uri}"

    # pipeline runs

    def open_run(self, name: str, config: Mapping[str, Any], *, resumes: str | None = None) -> str:
        """Open a pipeline run for a configuration and return its id; `resumes` is the run that it goes on with.

        Runs of this host whose process is gone are closed first: a kill is found by the next start.
        """
        self.reconcile(watch_seconds=None)
        run = self._attempts.open_pipeline(name, config, resumes)
        self._start_beat(run, lambda: {HEARTBEAT: stamp()})
        self._backend(run).put(CONFIG_FILE, json.dumps(config, indent=1, sort_keys=True).encode())
        return run

    def _start_beat(self, run: str, tags: Callable[[], dict[str, str]]) -> None:
        beat = self._beats[run] = Heartbeat(self._tracking)
        beat.add(run, tags)
        beat.start()

    def _end_beat(self, run: str) -> None:
        if beat := self._beats.pop(run, None):
            beat.stop()

    def close_run(
        self,
        run: str,
        status: Literal["FINISHED", "FAILED", "KILLED"],
        summary: Summary | None = None,
        reason: str = "",
    ) -> None:
        """Give a pipeline run its final status, and log what it says."""
        if summary is not None:
            self._backend(run).put(SUMMARY_FILE, summary.model_dump_json(indent=1).encode())
            self._attempts.say(run, summary, {})
        self._end_beat(run)
        self._attempts.close(run, status, reason)

    def runs(self) -> list[RunRow]:
        """Return the pipeline runs, newest first."""
        return self._attempts.pipelines()

    def run_config(self, run: str) -> dict[str, Any]:
        """Return the configuration of a pipeline run."""
        config: dict[str, Any] = json.loads(self._backend(run).get(CONFIG_FILE))
        return config

    def run_summary(self, run: str) -> Summary | None:
        """Return what a pipeline run said when it was closed, None while it has not."""
        try:
            return Summary.model_validate_json(self._backend(run).get(SUMMARY_FILE))
        except ArtifactError:
            return None

    def note_result(self, run: str, name: str, result: Result) -> None:
        """Remember that pipeline run `run` got `result` under `name`; the runner does this for every request."""
        self._attempts.note(run, name, result)

    def attempts(self, run: str) -> list[AttemptRow]:
        """Return what was done or adopted in a pipeline run, oldest first, with references and costs."""
        return merged(self._attempts.of(run), self._attempts.noted(run), self.read_manifest)

    def users(self) -> dict[str, int]:
        """Return attempt → how many configurations' runs were given its result (see `Attempts.users`)."""
        return self._attempts.users()

    def find_attempt(self, run: str, name: str) -> Manifest:
        """Return the manifest of the newest result called `name` (or of the stage `name`) in a pipeline run."""
        noted = self._attempts.noted(run)
        found = [item for item in noted if item.name == name] or [item for item in noted if item.stage == name]
        if not found:
            known = ", ".join(dict.fromkeys(item.name for item in noted)) or "none"
            raise ArtifactError(f"run {run} has a result called {name!r}", f"it has: {known}", "name one of these")
        return self.read_manifest(found[-1].run)

    def reconcile(self, *, watch_seconds: float | None = 15.0) -> list[str]:
        """Close runs whose process is gone, and return their ids (see `zombies.py`).

        `watch_seconds` is how long a silent one of another host is watched first; None leaves those alone.
        """
        closed = close_lost(self._tracking, self._attempts, watch_seconds, self.is_committed)
        for run in closed:
            for place in self.work.glob(f"*.{run}"):  # of an attempt that no other goes on with
                discard(place)
        return closed

    def garbage(self, *, unfinished_seconds: float) -> Garbage:
        """Return what no run refers to (see `garbage.py`), once what is dead has been closed."""
        self.reconcile()
        return Garbage(self, unfinished_seconds)

    def registry(self, attempt: str | None = None) -> ModelRegistry:
        """Return the model registry; a model card is stored with `attempt`."""
        if attempt is None:
            return ModelRegistry(self._coordination)
        return ModelRegistry(self._coordination, lambda card: self._backend(attempt).put("card.md", card.encode()))

    # the runner's side

    def committed(self, stage: str, identity: str, *, verify: bool = False) -> Manifest | None:
        """Return the newest commit of `identity` whose payload is what was committed, or None."""
        return self._newest(self._coordination.state(stage, identity), verify)

    def acquire(
        self, stage: str, identity: str, waiting: Callable[[Claim], None], *, verify: bool = False
    ) -> Manifest | Lease:
        """Return the commit of `identity`, perhaps after waiting for who works on it, or the lease to work on it."""
        found: list[Manifest] = []

        def adopt(state: State) -> bool:
            manifest = self._newest(state, verify)
            found.extend([manifest] if manifest else [])
            return manifest is not None

        lease = acquire(self._coordination, stage, identity, adopt, waiting)
        if lease is None:
            return found[-1]
        if lease.number > 1:  # who held it before is gone, silent or done: what it left open is closed
            state = self._coordination.state(stage, identity)
            close_superseded(self._attempts, state, f"claim {lease.number} took over")
        return lease

    def is_committed(self, stage: str, identity: str, run: str) -> bool:
        """Return whether attempt `run` made a commit of `identity`."""
        return any(commit.run == run for commit in self._coordination.state(stage, identity).commits)

    def clear_work(self, stage: str, identity: str) -> None:
        """Remove what a process that died after its commit left in the work folder, unless someone works there."""
        home = self.work / identity
        if home.exists():
            held = self._coordination.state(stage, identity).held
            if held is None or held[1].process.gone():
                discard(home)

    def withdrawn(self, run: str) -> bool:
        """Return whether attempt `run` was removed since (see `garbage.py`); then it is not read again from memory."""
        gone = self._attempts.deleted(run)
        if gone:
            self._backends.pop(run, None)
            self._remote.pop(run, None)
        return gone

    def superseded(self, stage: str, lease: Lease) -> bool:
        """Return whether another process took the lease's identity over."""
        return self._coordination.state(stage, lease.identity).next > lease.number + 1

    def kindred(self, stage: str, kin: str) -> Iterator[Manifest]:
        """Yield the manifests of finished attempts with this kin, newest first; one that cannot be read is left out."""
        for run in self._attempts.kindred(stage, kin):
            with suppress(ArtifactError):
                yield self.read_manifest(run)

    def open_attempt(self, verb: str, identity: str, origin: Origin, *, shared: bool, kin: str = "") -> str:
        """Open the MLflow run of an attempt; `shared` says that a commit of the identity ends it (see `Attempts`)."""
        return self._attempts.open_attempt(verb, identity, origin, shared=shared, kin=kin)

    def beat(self, lease: Lease | None, attempt: str, costs: Callable[[], Mapping[str, Cost]]) -> None:
        """Let the lease's heartbeat, or one of its own, say that `attempt` is alive and what it has spent."""
        if lease is None:
            self._start_beat(attempt, lambda: self._attempts.sign_of_life(costs()))
            return
        lease.attempt(attempt)
        lease.heartbeat.add(attempt, lambda: self._attempts.sign_of_life(costs()))

    def publish(self, manifest: Manifest, folders: Mapping[str, Path]) -> str:
        """Put payloads, then the manifest, into the attempt's artifacts; log what it says; return its sha256."""
        digest = artifacts.publish(self._backend(manifest.run), manifest, folders)
        self._attempts.say(manifest.run, manifest.summary, manifest.costs, digest)
        return digest

    def finish(self, attempt: str) -> None:
        """Close an attempt whose manifest is committed."""
        self._end_beat(attempt)
        self._attempts.close(attempt, "FINISHED")

    def abandon(
        self,
        attempt: str,
        status: Literal["FAILED", "KILLED"],
        reason: str,
        costs: Mapping[str, Cost],
        outputs: Iterable[str],
    ) -> None:
        """Close an attempt that committed nothing, and take back what it had published of `outputs`."""
        self._end_beat(attempt)
        self._backend(attempt).discard([MANIFEST_FILE, *outputs])
        self._attempts.close(attempt, status, reason, costs)

    def measure(self, name: str, contract: str, folder: Path, run: str) -> Output:
        """Validate a payload and return its entry of the manifest (see `artifacts.measure`)."""
        return artifacts.measure(name, contract_of(contract), folder, run, self._hashes)
