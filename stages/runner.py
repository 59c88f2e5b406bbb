"""Does one stage's work, anywhere: resolve, verify, adopt or run, validate, charge, commit.

Promises that a stage whose work was committed is adopted without running (and without importing torch), that nothing
is committed unless every output keeps its contract, and that an attempt ends with a true status whatever ends it. The
stage alone knows how to compute; the store alone where things lie.
"""

from __future__ import annotations

import functools
import logging
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from data_contracts.cost import Cost
from data_contracts.errors import ArtifactError
from data_contracts.ledger import BEYOND, Ledger
from data_contracts.records import CONTRACTS, Manifest, Ref, Request, Result, StoreAddress
from data_contracts.store import Lease, Store
from stages.admission import earlier_commit, open_inputs, parse_slice
from stages.ending import Ending, explained, peak_bytes, terminated_by_signal
from stages.identity import Version, device, identity_of, kin_of, stage_version
from stages.meter.energy import EnergyMeter
from stages.stage import Inputs, Stage, find_stage
from stages.work import Desk, Reporter, Silent, inherited

_log = logging.getLogger(__name__)

CAUSE_OF = {
    "ingest": "ingest",
    "plan": "reconfigure",
    "begin": "warm_up",
    "score": "score",
    "mix": "select",
    "select": "select",
    "train": "train",
    "govern": "reconfigure",
    "weigh": "probe",
    "quote": "reconfigure",
    "evaluate": "eval",
    "judge": "eval",
    "promote": "reconfigure",
}
"""Under which cause a stage's own seconds and memory are charged, where it names none (`Stage.cause`)."""


def run(request: Request, *, reporter: Reporter | None = None) -> Result:
    """Return the committed outputs that `request` asks for, made now or adopted.

    Raises a `LazyTrainError` for what a user can mend, `SystemExit(143)` after SIGTERM. Nothing is committed then; the
    work folder is kept, so that the next attempt at the same work resumes.
    """
    reporter = reporter or Silent()
    stage = find_stage(request.verb)
    config = parse_slice(stage, request.config)
    store = _store(request.store)
    inputs = open_inputs(store, stage, request)
    version = stage_version(stage, config)
    external = stage.external(config, Path(str(request.knobs.get("root") or ".")))
    descent = store.descent(refs_of(request)) if stage.reads_ledger else ()
    identity = identity_of(stage.verb, version.digest, external, request.inputs, descent)
    job = _Job(request, stage, config, store, inputs, version, identity, reporter)
    with terminated_by_signal() as job.ending:
        while True:
            result = job.run_alone() if stage.effect or request.refresh else job.run_or_adopt()
            if request.origin.run is not None:
                store.note_result(request.origin.run, request.origin.name or stage.verb, result)
            if not (result.cached and store.withdrawn(result.run)):  # `lazytrain gc` looks at notes after withdrawing
                return result


@functools.lru_cache(maxsize=8)
def _store(address: StoreAddress) -> Store:
    """Return this process's store at `address`: finding its coordination runs again costs more than an adoption."""
    return Store(address)


class _Job:
    """One request in progress."""

    def __init__(
        self,
        request: Request,
        stage: Stage[Any],
        config: Any,
        store: Store,
        inputs: Inputs,
        version: Version,
        identity: str,
        reporter: Reporter,
    ) -> None:
        self.request, self.stage, self.config, self.store, self.inputs = request, stage, config, store, inputs
        self.version, self.identity, self.reporter = version, identity, reporter
        self.verify = bool(request.knobs.get("verify"))
        self.started, self.energy = time.monotonic(), EnergyMeter(())
        self.desk: Desk | None = None
        self.ending = Ending()
        self.committing = self.closed = False

    @functools.cached_property
    def kin(self) -> str:
        """What commits share whose rows came about as this one's; "" where rows are not alone."""
        value = self.stage.kin(self.config, self.inputs)
        return kin_of(self.stage.verb, self.version.digest, value)

    def run_or_adopt(self) -> Result:
        """Adopt the commit of the identity, or hold its lease and make it."""
        verb = self.stage.verb
        found = self.store.acquire(
            verb,
            self.identity,
            lambda claim: self.reporter.notice(
                f"{verb}: waiting for process {claim.process.pid} on {claim.process.host}, which works on the same"
            ),
            verify=self.verify,
        )
        if isinstance(found, Manifest):
            self.store.clear_work(verb, self.identity)
            return _result(found, cached=True)
        lease = found
        home = self.store.work / self.identity
        try:
            with self._attempt(lease) as attempt:
                place = inherited(home, lease.number)
                manifest, digest = self._compute(attempt, place)
                with self.ending.held():
                    self.committing = True
                    commit = lease.commit(attempt, digest)
                    won = commit.run == attempt
                    if won:
                        self.store.finish(attempt)
                    else:
                        reason = f"run {commit.run} committed first"
                        self.store.abandon(attempt, "KILLED", reason, manifest.costs, self.stage.gives)
                    self.closed = True
                    lease.release("committed" if won else "superseded")
                    if won:
                        shutil.rmtree(home, ignore_errors=True)
        except Exception as error:
            lease.release(type(error).__name__)
            if self.store.superseded(verb, lease):
                _log.warning("another process took over meanwhile; its result counts, not this error: %s", error)
                return self.run_or_adopt()
            raise
        except BaseException as error:
            lease.release(type(error).__name__)
            raise
        return _result(manifest if won else self.store.read_manifest(commit.run), cached=not won)

    def run_alone(self) -> Result:
        """Make a new attempt that no other request adopts: an effect, or one made on purpose beside a commit."""
        with self._attempt() as attempt:
            place = self.store.work / f"{self.identity}.{attempt}"
            try:
                manifest, _ = self._compute(attempt, place)
            finally:
                shutil.rmtree(place, ignore_errors=True)
            with self.ending.held():
                self.store.finish(attempt)
                self.closed = True
        return _result(manifest, cached=False)

    @property
    def costs(self) -> dict[str, Cost]:
        """What was spent so far: the stage's charges, and the rest of wall seconds, peak memory and energy."""
        costs = dict(self.desk.costs) if self.desk else {}
        cause = self.stage.cause(self.config) or CAUSE_OF.get(self.stage.verb, "reconfigure")
        rest = time.monotonic() - self.started - sum(cost.seconds for cost in costs.values())
        own = Cost(seconds=max(0.0, rest), peak_bytes=peak_bytes(), joules=self.energy.joules())
        return {**costs, cause: costs.get(cause, Cost()) + own}

    @contextmanager
    def _attempt(self, lease: Lease | None = None) -> Iterator[str]:
        """Open an attempt; on any failure close it as KILLED or FAILED, take back what was published, and re-raise."""
        self.started, self.desk, self.committing, self.closed = time.monotonic(), None, False, False
        self.energy = EnergyMeter()
        attempt: str | None = None
        try:
            with self.ending.held():  # a signal between the opening and the knowledge of it would leave it RUNNING
                attempt = self.store.open_attempt(
                    self.stage.verb, self.identity, self.request.origin, shared=lease is not None, kin=self.kin
                )
                self.store.beat(lease, attempt, lambda: self.costs)
            yield attempt
        except BaseException as error:
            if attempt is not None and not self.closed:
                self._close(attempt, error)
            known = explained(error, self.stage.verb, f"{self.store.work} and {self.store.artifact_root}")
            if known is not None:
                raise known from error
            raise

    def _close(self, attempt: str, error: BaseException) -> None:
        status: Literal["FAILED", "KILLED"] = "FAILED" if isinstance(error, Exception) else "KILLED"
        try:
            if self.committing and self.store.is_committed(self.stage.verb, self.identity, attempt):
                self.store.finish(attempt)  # the answer to the commit was lost, the commit was not
                return
            self.store.abandon(attempt, status, f"{type(error).__name__}: {error}", self.costs, self.stage.gives)
        except Exception as second:  # the first error is what the user must see; `reconcile` closes the attempt
            _log.warning("attempt %s could not be closed: %s", attempt, second)

    def _compute(self, attempt: str, place: Path) -> tuple[Manifest, str]:
        stage, request = self.stage, self.request
        desk = self.desk = Desk(
            place,
            stage.gives,
            seed=int(request.config.get("seed", 0)),
            knobs=request.knobs,
            reporter=self.reporter,
            spent=self._spent,
            registry=self._registry(attempt),
            earlier=lambda: earlier_commit(self.store, stage, self.kin),
        )
        summary = stage.run(self.config, self.inputs, desk)
        folders = desk.finish(stage.optional)
        outputs = {
            name: self.store.measure(name, CONTRACTS[stage.gives[name]].id, folder, attempt)
            for name, folder in folders.items()
        }
        manifest = Manifest(
            stage=stage.verb,
            stage_version=self.version.digest,
            identity=self.identity,
            run=attempt,
            config=request.config,
            inputs={name: refs for name, refs in request.inputs.items() if refs},
            outputs=outputs,
            costs=self.costs,
            summary=summary.model_copy(update={"notices": tuple(dict.fromkeys((*summary.notices, *desk.notices)))}),
            libraries=self.version.libraries,
            environment={
                "host": platform.node(),
                "system": platform.platform(),
                "python": platform.python_version(),
                "device": device(),
                "knobs": dict(request.knobs),
            },
        )
        return manifest, self.store.publish(manifest, folders)

    def _spent(self, refs: Sequence[Ref]) -> Ledger:
        if not self.stage.reads_ledger:
            raise ArtifactError(
                "a stage that reads the ledger says so, since what was spent then decides what comes out",
                f"{self.stage.verb} does not",
                "set `reads_ledger = True` on the stage",
            )
        return self.store.ledger(refs or refs_of(self.request))

    def _registry(self, attempt: str) -> Any:
        def registry() -> Any:
            if not self.stage.effect:
                raise ArtifactError(
                    "only an effect sees the registry", f"{self.stage.verb} is none", "set `effect = True` on the stage"
                )
            return self.store.registry(attempt)

        return registry


def refs_of(request: Request) -> tuple[Ref, ...]:
    """Return every input of a request that is this run's work."""
    return tuple(ref for name, given in request.inputs.items() if name not in BEYOND for ref in given)


def _result(manifest: Manifest, *, cached: bool) -> Result:
    return Result(
        stage=manifest.stage,
        identity=manifest.identity,
        run=manifest.run,
        cached=cached,
        refs={name: output.ref for name, output in manifest.outputs.items()},
        costs=manifest.costs,
    )
