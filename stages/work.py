"""The desk a stage works at: scratch, outputs, charges, quarantine, random numbers, progress.

Implements the `Work` protocol of `stage.py` for one attempt. Promises that outputs are written beside the scratch and
start empty, and that random numbers depend on the configured seed and names alone. What becomes of the outputs is the
runner's business.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.arrow import TABLE_FILE, TableWriter, read_batches, write_table
from data_contracts.canonical import canonical
from data_contracts.contract import Contract
from data_contracts.cost import CAUSES, Cost, Frozen
from data_contracts.errors import ArtifactError
from data_contracts.ledger import Ledger
from data_contracts.records import CONTRACTS, MEASURED, RECORD_FILE, Ref
from data_contracts.tables import QUARANTINE
from stages.stage import Inputs, Progress, Registry

_log = logging.getLogger(__name__)

_SORT_ROWS = 200_000


class Reporter(Protocol):
    """Who shows what is going on; a command or a flow supplies one."""

    def progress(self, what: str, total: float | None, unit: str) -> AbstractContextManager[Progress]:
        """Show a progress bar with rate and remaining time."""

    def notice(self, text: str) -> None:
        """Tell the user something once."""


class _NoBar:
    def advance(self, amount: float = 1) -> None:
        """Show nothing."""


class Silent:
    """The reporter of a process without a terminal: notices go to the log, bars nowhere."""

    @contextmanager
    def progress(self, what: str, total: float | None, unit: str) -> Iterator[Progress]:
        """Show nothing."""
        yield _NoBar()

    def notice(self, text: str) -> None:
        """Log the text."""
        _log.info("%s", text)


class Desk:
    """One attempt's `Work`.

    Args:
        place: the claim's folder: `scratch` in it survives a kill, `outputs` is made anew.
        gives: output name to contract name.
    """

    def __init__(
        self,
        place: Path,
        gives: Mapping[str, str],
        *,
        seed: int,
        knobs: Mapping[str, Any],
        reporter: Reporter,
        spent: Callable[[Sequence[Ref]], Ledger],
        registry: Callable[[], Registry],
        earlier: Callable[[], Inputs | None],
    ) -> None:
        self.folder = place / "scratch"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.outputs = place / "outputs"
        shutil.rmtree(self.outputs, ignore_errors=True)
        self.outputs.mkdir()
        self.knobs = knobs
        self.costs: dict[str, Cost] = {}
        self.notices: list[str] = []
        self._gives, self._seed, self._reporter = gives, seed, reporter
        self._spent, self._registry, self._earlier = spent, registry, earlier
        self._opened: set[str] = set()
        self._refused: TableWriter | None = None

    def seed(self, *names: str | int) -> int:
        """Return a 63-bit seed of the configured seed and `names`."""
        return int.from_bytes(hashlib.sha256(canonical([self._seed, *names])).digest()[:8], "big") >> 1

    def rng(self, *names: str | int) -> np.random.Generator:
        """Return a generator of the configured seed and `names`."""
        return np.random.Generator(np.random.PCG64(self.seed(*names)))

    def writer(self, output: str, *, extra: bool = False) -> TableWriter:
        """Open a table output for writing, once."""
        contract = self._table(output)
        return TableWriter(self._once(output) / TABLE_FILE, contract.whole if extra else contract.schema)

    def table(self, output: str, columns: pa.Table | Mapping[str, Sequence[Any]]) -> None:
        """Write a table output whole."""
        write_table(self._once(output) / TABLE_FILE, self._table(output).schema, columns)

    def record(self, output: str, value: Frozen) -> None:
        """Write a record output."""
        (self._once(output) / RECORD_FILE).write_bytes(canonical(value.model_dump(mode="json")))

    def path(self, output: str) -> Path:
        """Return the empty folder of a folder output."""
        return self._once(output)

    def measured(self, output: str, name: str) -> Path:
        """Return the path of a measured file of an output."""
        path = self._folder(output) / MEASURED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def charge(self, cause: str, cost: Cost) -> None:
        """Add to what this attempt spent under `cause`."""
        if cause not in CAUSES:
            raise ValueError(f"{cause!r} is no cause of cost; one of {', '.join(CAUSES)}")
        self.costs = {**self.costs, cause: self.costs.get(cause, Cost()) + cost}  # replaced: the heartbeat reads it

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
        """Record a row that is not used; the output `quarantine` is sorted when the stage is done."""
        if self._refused is None:
            self._folder("quarantine")
            self._refused = TableWriter(self.outputs.parent / "quarantine.arrow", QUARANTINE.schema)
        self._refused.append(
            {
                "split": split,
                "file": file,
                "row": row,
                "line": line,
                "example_id": example_id,
                "field": field,
                "reason": reason,
                "detail": detail,
            }
        )

    def spent(self, *refs: Ref) -> Ledger:
        """Return the ledger of everything that the inputs, or those of them that are named, descend from."""
        return self._spent(refs)

    def earlier(self) -> Inputs | None:
        """Return inputs and outputs of the newest commit of the same work on other rows, or None."""
        return self._earlier()

    def registry(self) -> Registry:
        """Return the model registry."""
        return self._registry()

    def progress(self, what: str, total: float | None, unit: str) -> AbstractContextManager[Progress]:
        """Show a progress bar."""
        return self._reporter.progress(what, total, unit)

    def notice(self, text: str) -> None:
        """Tell the user something, now and with the summary."""
        if text not in self.notices:
            self.notices.append(text)
            self._reporter.notice(text)

    def finish(self, optional: frozenset[str]) -> dict[str, Path]:
        """Return output name → folder of everything made. Raises `ArtifactError` for a declared output that is not."""
        if "quarantine" in self._gives and "quarantine" not in self._opened:
            self._write_quarantine()
        missing = sorted(set(self._gives) - self._opened - optional)
        if missing:
            raise ArtifactError(
                "a stage makes every output that it gives", f"it made no {', '.join(missing)}", "mend the stage"
            )
        return {name: self.outputs / name for name in sorted(self._opened)}

    def _write_quarantine(self) -> None:
        columns = QUARANTINE.schema.names
        with self.writer("quarantine") as writer:
            if self._refused is None:
                return
            self._refused.close()
            table = pa.Table.from_batches(read_batches(self._refused.path), schema=QUARANTINE.schema)
            order = pc.sort_indices(table, [(name, "ascending") for name in columns])
            for start in range(0, len(order), _SORT_ROWS):
                writer.extend(table.take(order.slice(start, _SORT_ROWS)))
            self._refused.path.unlink()

    def _folder(self, output: str) -> Path:
        if output not in self._gives:
            raise ArtifactError(
                f"`{output}` is an output of the stage", f"it gives {', '.join(self._gives)}", "declare it in `gives`"
            )
        return self.outputs / output

    def _once(self, output: str) -> Path:
        folder = self._folder(output)
        if output in self._opened:
            raise ArtifactError(f"the output `{output}` is written once", "it was opened twice", "mend the stage")
        self._opened.add(output)
        folder.mkdir(exist_ok=True)
        return folder

    def _table(self, output: str) -> Contract:
        contract = CONTRACTS[self._gives[output]]
        if not isinstance(contract, Contract):
            raise ArtifactError(f"`{output}` is a table", f"it is a {contract.kind}", "use record() or path()")
        return contract


def inherited(home: Path, claim: int) -> Path:
    """Return the folder of a claim, holding what the newest claim before it left; a late holder loses its paths."""
    place = home / f"claim-{claim}"
    home.mkdir(parents=True, exist_ok=True)
    left = [path for path in home.glob("claim-*") if path != place]
    if left and not place.exists():
        max(left, key=lambda path: int(path.name.rpartition("-")[2])).rename(place)
    place.mkdir(exist_ok=True)
    return place
