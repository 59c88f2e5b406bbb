"""Reading the store: manifests, verified payloads, records, and the ledger that is folded from them.

Promises that what is handed out is what was committed. A manifest is trusted only with the sha256 that its attempt
logged; a payload only with the sizes and hashes of its manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from data_contracts.canonical import digest_of
from data_contracts.cost import Cost, Frozen
from data_contracts.errors import ArtifactError, ConfigError
from data_contracts.ledger import BEYOND, Entry, Ledger
from data_contracts.records import RECORD_FILE, Manifest, Ref, StoreAddress
from data_contracts.store import artifacts
from data_contracts.store.attempts import COSTS, MANIFEST, load_costs
from data_contracts.store.backends import InPlace
from data_contracts.store.hashes import Hashes
from data_contracts.store.lease import Coordination, State
from data_contracts.store.tracking import Tracking, local_path
from data_contracts.store.uploading import Uploading, backend_of

R = TypeVar("R", bound=Frozen)

_log = logging.getLogger(__name__)

CACHE_BYTES = 20 * 2**30


class Reader:
    """What can be read at one address (see `Store`)."""

    def __init__(self, address: StoreAddress, *, cache_bytes: int = CACHE_BYTES) -> None:
        work = local_path(address.work_uri)
        if work is None:
            raise ConfigError(
                "`store.work_uri` is a folder that this machine sees",
                f"it is {address.work_uri}",
                "mount it, give its path",
            )
        self.address, self.work = address, work
        self._cache_bytes = cache_bytes
        self._tracking = Tracking(address)
        self._coordination = Coordination(self._tracking)
        self._hashes = Hashes(work / "hashes.sqlite")
        self._remote: dict[str, Manifest] = {}
        self._digests: dict[str, str] = {}  # run → sha256 of its manifest, which is written once
        self._backends: dict[str, InPlace | Uploading] = {}
        self._gone: set[str] = set()  # attempts that were deleted in MLflow: not adopted any more

    def _backend(self, run: str) -> InPlace | Uploading:
        if run not in self._backends:
            try:
                found = self._tracking.do(lambda client: client.get_run(run))
            except Exception as error:
                if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
                    raise
                raise ArtifactError(
                    f"run {run} is in this store", "it is not", "give the store that the reference comes from"
                ) from error
            if found.info.lifecycle_stage == "deleted":
                self._gone.add(run)
            uri, cache = found.info.artifact_uri, self.work / "cache"
            if MANIFEST in found.data.params:
                self._digests[run] = found.data.params[MANIFEST]
            self._backends[run] = backend_of(self._tracking, run, uri, cache, self._cache_bytes)
        return self._backends[run]

    def read_manifest(self, run: str) -> Manifest:
        """Return the manifest of a committed attempt. Raises `ArtifactError` where there is none, or it was altered."""
        backend = self._backend(run)
        digest = self._digests.get(run) or self._tracking.params(run).get(MANIFEST)
        if digest is None:
            raise ArtifactError(f"run {run} committed an artifact", "it committed nothing", "re-run its stage")
        self._digests[run] = digest
        if isinstance(backend, InPlace):
            return artifacts.read_manifest(backend, digest)
        if run not in self._remote:  # a download each time would make the ledger slow
            self._remote[run] = artifacts.read_manifest(backend, digest)
        return self._remote[run]

    def open(self, ref: Ref, *, verify: bool = False) -> Path:
        """Return the folder of `ref`'s content, read-only, verified; `verify` reads every byte again.

        Raises `ArtifactError` for a reference that is not in its run's manifest, or a payload that is not what was
        committed.
        """
        output = self.read_manifest(ref.run).outputs.get(ref.path)
        if output is None or output.ref != ref:
            raise ArtifactError(
                f"{ref.path} with digest {ref.digest[:16]}… is an output of run {ref.run}",
                f"its manifest lists {'another digest' if output else 'no such output'}",
                "use a reference that the stage returned",
            )
        return artifacts.open_verified(self._backend(ref.run), output, self._hashes, fresh=verify)

    def measured(self, ref: Ref) -> Path:
        """Return the folder of the measured files beside `ref`'s content; empty or absent where there are none."""
        return self._backend(ref.run).measured(self.read_manifest(ref.run).outputs[ref.path])

    def record(self, ref: Ref, kind: type[R]) -> R:
        """Read a record artifact. Raises `ArtifactError` for one that another version of the project wrote."""
        try:
            return kind.model_validate_json((self.open(ref) / RECORD_FILE).read_bytes())
        except ValidationError as error:
            raise ArtifactError(
                f"{ref.path} of run {ref.run} is a record of this version",
                f"it keeps {ref.contract} and does not parse",
                "run the pipeline again: the stage runs anew",
            ) from error

    def ledger(self, refs: Iterable[Ref], *, lost: bool = False, users: Mapping[str, int] | None = None) -> Ledger:
        """Return what everything that `refs` descend from cost, each identity once.

        What a run goes on from, or compares with (`BEYOND`), was another run's work, which that run paid for.
        `lost` adds attempts that spent and committed nothing; `users` (see `Store.users`) amortises: each attempt is
        charged at its part a user. Both are for people. Decisions leave them out, so that neither a crash nor another
        run changes one.
        """
        entries = self._descent(refs)
        if users is not None:
            entries = [item._replace(costs=_over(item.costs, users.get(item.run, 1))) for item in entries]
        if lost:
            for entry in tuple(entries):
                entries.extend(self._lost(entry))
        return Ledger.fold(entries)

    def descent(self, refs: Iterable[Ref]) -> tuple[str, ...]:
        """Return what was made by all work that `refs` descend from: stages and contents, sorted, each once."""
        return tuple(sorted({f"{entry.stage} {entry.content}" for entry in self._descent(refs)}))

    def _descent(self, refs: Iterable[Ref]) -> list[Entry]:
        entries: list[Entry] = []
        waiting, seen = [ref.run for ref in refs], set[str]()
        while waiting:
            run = waiting.pop()
            if run in seen:
                continue
            seen.add(run)
            manifest = self.read_manifest(run)
            entries.append(Entry(manifest.identity, run, manifest.stage, manifest.costs, content=content_of(manifest)))
            waiting.extend(ref.run for name, given in manifest.inputs.items() if name not in BEYOND for ref in given)
        return entries

    def _lost(self, entry: Entry) -> Iterable[Entry]:
        for run in self._coordination.state(entry.stage, entry.identity).attempts:
            found = self._tracking.do(lambda client, run=run: client.get_run(run))  # type: ignore[misc]
            if found.info.status in ("FAILED", "KILLED"):
                yield Entry(entry.identity, run, entry.stage, load_costs(found.data.tags.get(COSTS)), lost=True)

    def _newest(self, state: State, verify: bool) -> Manifest | None:
        for commit in reversed(state.commits):
            try:
                backend = self._backend(commit.run)
                if commit.run in self._gone:
                    continue
                manifest = artifacts.read_manifest(backend, commit.manifest)
                for output in manifest.outputs.values():
                    artifacts.open_verified(backend, output, self._hashes, fresh=verify)
            except ArtifactError as error:
                _log.warning("commit %s of run %s cannot be used: %s", commit.number, commit.run, error.found)
                continue
            return manifest
        return None


def content_of(manifest: Manifest) -> str:
    """Return one name for what was made of what; the decision that asked for it is no part of that."""
    given = {name: [ref.digest for ref in refs] for name, refs in manifest.inputs.items() if name != "decision"}
    return digest_of({"made": sorted(output.ref.digest for output in manifest.outputs.values()), "of": given})


def _over(costs: Mapping[str, Cost], users: int) -> dict[str, Cost]:
    return {cause: cost.over(users) for cause, cost in costs.items()}
