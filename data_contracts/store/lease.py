"""One commit an identity, without a lock server.

MLflow params are write-once: of any number of concurrent writers of one key, one succeeds. On a coordination run that
all processes agree on, claim n of an identity is the param `<identity>.claim.<n>` and commit k is
`<identity>.commit.<k>`. A holder is alive while its heartbeat is seen to change on the waiter's own clock; a dead or
released claim n is followed by claim n+1. Readers trust only commits, so a holder that wakes up late is harmless.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from data_contracts.cost import Frozen
from data_contracts.store.heartbeat import Heartbeat, stamp
from data_contracts.store.process import Process, this_process
from data_contracts.store.tracking import Tracking

EXPERIMENT = "lazytrain.coordination"
POINTER = "lazytrain.coordination.root"
KIND = "lazytrain.kind"
SILENCE_SECONDS = 60.0
POLL_SECONDS = 0.5


class Claim(Frozen):
    """Who holds an identity: a unique holder and its process."""

    holder: str
    process: Process


class Commit(Frozen):
    """The commit of an identity: the attempt's run and the sha256 of its manifest."""

    number: int
    run: str
    manifest: str


@dataclass(frozen=True)
class State:
    """What the coordination run says about one identity, newest last."""

    commits: tuple[Commit, ...] = ()
    claims: tuple[tuple[int, Claim], ...] = ()
    released: frozenset[int] = frozenset()
    attempts: tuple[str, ...] = ()

    @property
    def held(self) -> tuple[int, Claim] | None:
        """The newest claim, unless it was released."""
        return self.claims[-1] if self.claims and self.claims[-1][0] not in self.released else None

    @property
    def next(self) -> int:
        """The number of the next claim."""
        return self.claims[-1][0] + 1 if self.claims else 1


@dataclass
class Coordination:
    """The coordination runs of a tracking server: one for each stage and first digit of the identity."""

    tracking: Tracking
    _root: str | None = None
    _shards: dict[str, str] = field(default_factory=dict)

    def root(self) -> str:
        """Return the run that names all others; racing creators agree, since experiments are unique by name."""
        if self._root is None:
            root = self.tracking.experiment_tag(POINTER, "run")
            if root is None:
                self.tracking.experiment(POINTER, {"run": self._new_run("root")})
                root = self.tracking.experiment_tag(POINTER, "run")
            self._root = root or ""
        return self._root

    def _new_run(self, name: str) -> str:
        experiment = self.tracking.experiment(EXPERIMENT)
        run: str = self.tracking.do(
            lambda client: client.create_run(experiment, run_name=name, tags={KIND: "coordination"})
        ).info.run_id
        self.tracking.do(lambda client: client.set_terminated(run, "FINISHED"))
        return run

    def shard(self, name: str) -> str:
        """Return the coordination run called `name`, made where it is not there."""
        if name not in self._shards:
            key = f"shard.{name}"
            known = self.tracking.params(self.root()).get(key)
            self._shards[name] = known or self.tracking.once(self.root(), key, self._new_run(name))
        return self._shards[name]

    def of(self, stage: str, identity: str) -> str:
        """Return the coordination run of one identity."""
        return self.shard(f"{stage}-{identity[0]}")

    def every(self, identity: str) -> list[tuple[str, State]]:
        """Return (stage, state) of `identity` for each stage that anyone has claimed it for; nothing is made."""
        ending, found = f"-{identity[0]}", []
        for key, run in self.tracking.params(self.root()).items():
            if key.startswith("shard.") and key.endswith(ending):
                state = state_of(self.tracking.params(run), identity)
                if state != State():
                    found.append((key.removeprefix("shard.").removesuffix(ending), state))
        return found

    def state(self, stage: str, identity: str) -> State:
        """Read what is known of `identity`."""
        return state_of(self.tracking.params(self.of(stage, identity)), identity)


def state_of(params: dict[str, str], identity: str) -> State:
    """Read the state of `identity` from a coordination run's params."""
    found: dict[str, dict[int, str]] = {"commit": {}, "claim": {}, "release": {}, "attempt": {}}
    pattern = re.compile(rf"{re.escape(identity)}\.(commit|claim|release|attempt)\.(\d+)")
    for key, value in params.items():
        if match := pattern.fullmatch(key):
            found[match[1]][int(match[2])] = value
    commits = []
    for number, value in sorted(found["commit"].items()):
        run, _, manifest = value.partition(":")
        commits.append(Commit(number=number, run=run, manifest=manifest))
    return State(
        commits=tuple(commits),
        claims=tuple((n, Claim.model_validate_json(value)) for n, value in sorted(found["claim"].items())),
        released=frozenset(found["release"]),
        attempts=tuple(value for _, value in sorted(found["attempt"].items())),
    )


class Lease:
    """A claim that this process holds on an identity, kept alive until it is released."""

    def __init__(self, coordination: Coordination, stage: str, identity: str, number: int, claim: Claim) -> None:
        self.number, self.identity = number, identity
        self.next_commit = 1
        self._tracking = coordination.tracking
        self._run = coordination.of(stage, identity)
        self._tag = f"heartbeat.{claim.holder}"
        self.heartbeat = Heartbeat(self._tracking)
        self.heartbeat.add(self._run, lambda: {self._tag: stamp()})

    def attempt(self, run: str) -> None:
        """Note the attempt that this claim opened, so that what it spent is known even if it is lost."""
        self._tracking.once(self._run, f"{self.identity}.attempt.{self.number}", run)

    def commit(self, run: str, manifest: str) -> Commit:
        """Try to commit (run, sha256 of its manifest); return the commit that stands: ours, or who came first."""
        key = f"{self.identity}.commit.{self.next_commit}"
        run, _, manifest = self._tracking.once(self._run, key, f"{run}:{manifest}").partition(":")
        return Commit(number=self.next_commit, run=run, manifest=manifest)

    def release(self, reason: str) -> None:
        """Give the claim up: the next one may follow at once."""
        self.heartbeat.stop()
        self._tracking.untag(self._run, self._tag)
        self._tracking.once(self._run, f"{self.identity}.release.{self.number}", reason)


def acquire(
    coordination: Coordination,
    stage: str,
    identity: str,
    adopt: Callable[[State], bool],
    waiting: Callable[[Claim], None],
    *,
    silence_seconds: float = SILENCE_SECONDS,
    poll_seconds: float = POLL_SECONDS,
) -> Lease | None:
    """Wait until `adopt(state)` is true (then None), or this process holds the identity (then its lease).

    Args:
        adopt: whether a commit of the state can be used; asked again whenever the state has changed.
        waiting: told once of each holder that is waited for.
        silence_seconds: a holder whose heartbeat does not change for so long is taken over.
    """
    tracking, run = coordination.tracking, coordination.of(stage, identity)
    told: set[str] = set()
    seen: tuple[str, str | None, float] = ("", None, time.monotonic())
    asked: State | None = None
    while True:
        found = tracking.do(lambda client: client.get_run(run)).data
        state = state_of(dict(found.params), identity)
        if state != asked:
            asked = state
            if adopt(state):
                return None
        if state.held is not None:
            holder = state.held[1]
            beat = found.tags.get(f"heartbeat.{holder.holder}")
            if seen[:2] != (holder.holder, beat):
                seen = (holder.holder, beat, time.monotonic())
            if not holder.process.gone() and time.monotonic() - seen[2] < silence_seconds:
                if holder.holder not in told:
                    told.add(holder.holder)
                    waiting(holder)
                time.sleep(poll_seconds)
                continue
        lease = claim(coordination, stage, identity, state.next)
        if lease is None:
            continue
        now = coordination.state(stage, identity)
        if now.commits != state.commits and adopt(now):  # committed between our look and our claim
            lease.release("adopted")
            return None
        lease.next_commit = now.commits[-1].number + 1 if now.commits else 1
        return lease


def claim(coordination: Coordination, stage: str, identity: str, number: int) -> Lease | None:
    """Try to make claim `number` of an identity; None where another did."""
    ours = Claim(holder=uuid.uuid4().hex, process=this_process())
    value = ours.model_dump_json()
    run = coordination.of(stage, identity)
    if coordination.tracking.once(run, f"{identity}.claim.{number}", value) != value:
        return None
    lease = Lease(coordination, stage, identity, number, ours)
    lease.heartbeat.start()
    return lease
