"""What a stage is, and all it may touch.

A stage is a function from (config, input artifacts) to output artifacts with contracts. It declares them and computes;
the runner alone resolves, validates, charges and commits, so a stage never sees MLflow, a store path or another stage.
A stage's module is light: it imports torch, transformers or ray inside `run`, through its engine modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from data_contracts.arrow import TABLE_FILE, TableWriter, read_batches, read_table
from data_contracts.cost import Cause, Cost, Frozen
from data_contracts.errors import ArtifactError, ConfigError
from data_contracts.ledger import Ledger
from data_contracts.method import Method, name_in, nearest, resolve
from data_contracts.records import MEASURED, RECORD_FILE, Ref, Summary

C = TypeVar("C", bound=Frozen)
R = TypeVar("R", bound=Frozen)

VERBS = (
    "ingest",
    "plan",
    "begin",
    "score",
    "mix",
    "select",
    "train",
    "govern",
    "weigh",
    "quote",
    "evaluate",
    "judge",
    "promote",
)
_HOMES = {"begin": "stages.train.begin"}


@dataclass(frozen=True)
class Takes:
    """One input: its contract's name, whether it may be missing, and whether there may be several."""

    contract: str
    optional: bool = False
    many: bool = False


@dataclass(frozen=True)
class Artifact:
    """A verified input: its reference and the folder that holds its files, read-only."""

    ref: Ref
    folder: Path
    beside: Callable[[], Path] | None = field(default=None, compare=False, repr=False)
    """Fetches the folder of its measured files; None: they lie in `folder`."""

    def measured(self, name: str) -> Path:
        """Return the path of a measured file; it may not be there."""
        return (self.beside() if self.beside is not None else self.folder / MEASURED) / name

    def table(self) -> pa.Table:
        """Map the table; its buffers stay on disk."""
        return read_table(self.folder / TABLE_FILE)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the table's record batches, one in memory."""
        return read_batches(self.folder / TABLE_FILE)

    def record(self, kind: type[R]) -> R:
        """Read the JSON record."""
        return kind.model_validate_json((self.folder / RECORD_FILE).read_bytes())


class Inputs:
    """The artifacts a stage was given, by name."""

    def __init__(self, artifacts: Mapping[str, Sequence[Artifact]]) -> None:
        self._artifacts = {name: tuple(items) for name, items in artifacts.items()}

    def names(self) -> tuple[str, ...]:
        """Return the names under which something was given."""
        return tuple(name for name, given in self._artifacts.items() if given)

    def all(self, name: str) -> tuple[Artifact, ...]:
        """Return every artifact given under `name`, in the order given; empty where there is none."""
        return self._artifacts.get(name, ())

    def maybe(self, name: str) -> Artifact | None:
        """Return the one artifact under `name`, or None."""
        given = self.all(name)
        if len(given) > 1:
            raise ArtifactError(f"at most one input `{name}`", f"{len(given)} were given", "pass one")
        return given[0] if given else None

    def one(self, name: str) -> Artifact:
        """Return the artifact under `name`. Raises `ArtifactError` where it was not given."""
        found = self.maybe(name)
        if found is None:
            raise ArtifactError(
                f"an input `{name}`", "it was not given", f"pass the output of the stage that makes {name}"
            )
        return found


class Progress(Protocol):
    """A progress bar: `advance(n)` moves it by n units."""

    def advance(self, amount: float = 1) -> None: ...


class Registered(Protocol):
    """A version of a registered model: its number and the checkpoint it was registered from."""

    version: int
    checkpoint: Ref


class Registry(Protocol):
    """The model registry as an effect sees it: read an alias, register a version, move the alias under a check."""

    def current(self, model: str, alias: str) -> Registered | None:
        """Return what `alias` names now, or None."""

    def promote(
        self, model: str, alias: str, candidate: Artifact, card: str, tags: Mapping[str, str], expected: str | None
    ) -> Registered:
        """Register `candidate` (once: the same checkpoint gives the same version) and move `alias` to it.

        Raises `ArtifactError` and moves nothing where `alias` does not name the checkpoint with digest `expected`
        (None: unset).
        """


class Work(Protocol):
    """All that a stage may touch besides its inputs."""

    folder: Path
    """Scratch that survives a kill: the next attempt on the same identity finds it as it was left."""
    knobs: Mapping[str, Any]
    """How to do it, not what comes out; `root` is the folder that relative user paths start from."""

    def rng(self, *names: str | int) -> np.random.Generator:
        """Return a generator that depends on the configured seed and `names` alone."""

    def seed(self, *names: str | int) -> int:
        """Return a 63-bit seed that depends on the configured seed and `names` alone (for torch)."""

    def writer(self, output: str, *, extra: bool = False) -> TableWriter:
        """Open table output `output` for writing, once, with its contract's extra columns where asked for; use it as a
        context manager."""

    def table(self, output: str, columns: pa.Table | Mapping[str, Sequence[Any]]) -> None:
        """Write table output `output` whole (for what fits in memory)."""

    def record(self, output: str, value: Frozen) -> None:
        """Write record output `output`."""

    def path(self, output: str) -> Path:
        """Return the empty folder of folder output `output`, to put its files in."""

    def measured(self, output: str, name: str) -> Path:
        """Return the path of a measured file beside `output`: hashed for integrity, outside its digest."""

    def charge(self, cause: str, cost: Cost) -> None:
        """Add `cost` to what this attempt spent under `cause`."""

    def quarantine(
        self,
        *,
        split: str,
        reason: str,
        detail: str,
        file: str = "",
        row: int = 0,
        line: int | None = None,
        example_id: str | None = None,
        field: str = "",
    ) -> None:
        """Record a row that is not used, with its reason. The stage must give the output `quarantine`."""

    def spent(self, *refs: Ref) -> Ledger:
        """Return the ledger of everything that the inputs, or those of them that are named, descend from.

        Only for a stage that says `reads_ledger`.
        """

    def earlier(self) -> Inputs | None:
        """Return inputs and outputs of the newest commit of the same work on other rows (`Stage.kin`), or None."""

    def registry(self) -> Registry:
        """Return the model registry; only for a stage that is an effect."""

    def progress(self, what: str, total: float | None, unit: str) -> AbstractContextManager[Progress]:
        """Show a progress bar with rate and remaining time."""

    def notice(self, text: str) -> None:
        """Tell the user something once: logged now, and shown with the summary."""


class Stage(Generic[C]):
    """The declaration of a stage; subclasses fill it in and define `run`."""

    verb: ClassVar[str]
    config: ClassVar[type[Frozen]]
    """A frozen model whose fields are the sections of the slice that the stage reads."""
    takes: ClassVar[Mapping[str, Takes]]
    gives: ClassVar[Mapping[str, str]]
    """Output name to contract name. An output that a run does not make must be listed in `optional`."""
    optional: ClassVar[frozenset[str]] = frozenset()
    recalls: ClassVar[frozenset[str] | None] = None
    """Of an earlier commit's inputs and outputs (`Work.earlier`), those that are opened; None is all."""
    effect: ClassVar[bool] = False
    """An effect changes something outside its artifacts and is never adopted from a commit."""
    reads_ledger: ClassVar[bool] = False
    """Whether what was spent decides what comes out (`Work.spent`): all that its inputs descend from then makes up its
    identity, since the same bytes can have cost more or less."""

    def chosen(self, config: C) -> Iterable[tuple[type[Method], Mapping[str, Any], str]]:
        """Return (family, settings, config path) of each method that the configuration chooses, importing none."""
        return ()

    def methods(self, config: C) -> Iterable[tuple[type[Method], str]]:
        """Return (family, name) of each method that may be used, importing none: they enter the stage's version.

        Raises `ConfigError` where a name is none.
        """
        return [(family, name_in(settings, where)) for family, settings, where in self.chosen(config)]

    def check(self, config: C) -> None:
        """Raise `MethodError` or `ConfigError`, with the nearest valid name, for a method or a setting that `run` would
        refuse: it is asked before anything is done, by a pipeline before its first stage."""
        for family, settings, where in self.chosen(config):
            resolve(family, settings, where)

    def external(self, config: C, root: Path) -> dict[str, Any]:
        """Return what replaces user paths in the identity: the config slice's canonical form with content digests.

        The default is the slice as it is. `root` is the folder that relative paths start from.
        """
        return config.model_dump(mode="json")

    def cause(self, config: C) -> Cause | None:
        """Return under which cause its own seconds, memory and energy are charged, beyond what it charged itself.

        None: that of its verb.
        """
        return None

    def kin(self, config: C, inputs: Inputs) -> Any:
        """Return in canonical form all that decides the outcome of a row besides the rows; None: rows are not alone.

        Commits of equal kin share rows: `Work.earlier` finds them. Not part of an identity: what comes out is the same.
        """
        return None

    def run(self, config: C, inputs: Inputs, work: Work) -> Summary:
        """Do the work through `work` and return what to say about it."""
        raise TypeError(f"{type(self).__name__} defines no run")


def find_stage(verb: str) -> Stage[Any]:
    """Import and return the stage called `verb`. Raises `ConfigError` with the nearest name for an unknown one."""
    if verb not in VERBS:
        raise ConfigError("the name of a stage", f"no stage is called {verb!r}", nearest(verb, list(VERBS)))
    module = import_module(_HOMES.get(verb, f"stages.{verb}.stage"))
    stage: Stage[Any] = module.STAGE
    return stage
