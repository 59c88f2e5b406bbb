"""A complete `Work` on plain folders, so that a test can run a stage without a store.

Outputs are written exactly as the runner's are (same writers, same file names) and can be read back as artifacts with a
real digest. It commits nothing, and gives no registry: a stage that is an effect needs the real one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.arrow import TABLE_FILE, TableWriter, read_batches
from data_contracts.canonical import file_sha256, tree_digest
from data_contracts.contract import Contract
from data_contracts.cost import Cost, Frozen
from data_contracts.errors import ArtifactError
from data_contracts.ledger import Entry, Ledger
from data_contracts.records import CONTRACTS, MEASURED, RECORD_FILE, Ref
from stages.stage import Artifact, Inputs, Registry, Stage


class _Bar:
    def __init__(self, total: float | None) -> None:
        self.total, self.done = total, 0.0

    def advance(self, amount: float = 1) -> None:
        self.done += amount


class LocalWork:
    """The `Work` of one attempt, kept under `folder`.

    Args:
        folder: where outputs and scratch go; made if absent.
        gives: output name to contract name, usually `STAGE.gives`.
        seed: of `rng` and `seed`.
        root: the folder that relative user paths start from.
        ledger: what the inputs descend from.
        earlier: inputs and outputs of a commit of the same work on other rows.
    """

    def __init__(
        self,
        folder: Path,
        gives: Mapping[str, str] | None = None,
        *,
        seed: int = 0,
        root: Path | None = None,
        knobs: Mapping[str, Any] | None = None,
        ledger: Ledger | None = None,
        earlier: Inputs | None = None,
    ) -> None:
        self.home = folder
        self.folder = folder / "scratch"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.knobs: Mapping[str, Any] = {"root": str(root or folder), **(knobs or {})}
        self.gives = dict(gives or {})
        self.notices: list[str] = []
        self.charges: list[tuple[str, Cost]] = []
        self.bars: list[tuple[str, _Bar]] = []
        self.opened: list[str] = []
        self._seed, self._ledger, self._earlier = seed, ledger or Ledger(), earlier
        self._quarantine: list[dict[str, Any]] = []

    def seed(self, *names: str | int) -> int:
        digest = hashlib.sha256(repr((self._seed, names)).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def rng(self, *names: str | int) -> np.random.Generator:
        return np.random.default_rng(self.seed(*names))

    def _place(self, output: str) -> Path:
        if output in self.opened:
            raise ArtifactError(f"output {output} is made once", "it was opened before", "open it once")
        self.opened.append(output)
        return self.home / "outputs" / output

    def _table_contract(self, output: str) -> Contract:
        contract = CONTRACTS[self.gives.get(output, output)]
        assert isinstance(contract, Contract), f"{output} is no table"
        return contract

    def writer(self, output: str, *, extra: bool = False) -> TableWriter:
        contract = self._table_contract(output)
        return TableWriter(self._place(output) / TABLE_FILE, contract.whole if extra else contract.schema)

    def table(self, output: str, columns: pa.Table | Mapping[str, Sequence[Any]]) -> None:
        with self.writer(output) as writer:
            writer.extend(columns)

    def record(self, output: str, value: Frozen) -> None:
        folder = self._place(output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD_FILE).write_text(value.model_dump_json())

    def path(self, output: str) -> Path:
        folder = self._place(output)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def measured(self, output: str, name: str) -> Path:
        folder = self.home / "outputs" / output / MEASURED
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def charge(self, cause: str, cost: Cost) -> None:
        self.charges.append((cause, cost))

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
        self._quarantine.append(
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

    @property
    def quarantined(self) -> list[dict[str, Any]]:
        """The quarantined rows so far, as dictionaries."""
        return list(self._quarantine)

    def spent(self, *refs: Ref) -> Ledger:
        return self._ledger

    def earlier(self) -> Inputs | None:
        return self._earlier

    def registry(self) -> Registry:
        raise ArtifactError("a stage that is an effect", "this work has no registry", "use the real store")

    @contextmanager
    def progress(self, what: str, total: float | None, unit: str) -> Iterator[_Bar]:
        bar = _Bar(total)
        self.bars.append((what, bar))
        yield bar

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def artifact(self, output: str) -> Artifact:
        """Validate an output against its contract and return it as a stage would be given it."""
        contract = CONTRACTS[self.gives.get(output, output)]
        folder = self.home / "outputs" / output
        if contract.name == "quarantine" and output not in self.opened:
            with self.writer(output) as writer:
                for row in self._quarantine:
                    writer.append(row)
        rows = contract.validate(read_batches(folder / TABLE_FILE)) if isinstance(contract, Contract) else 0
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and folder / MEASURED not in path.parents]
        entries = [(path.relative_to(folder).as_posix(), path.stat().st_size, file_sha256(path)) for path in files]
        digest = tree_digest(entries, contract.id)
        size = sum(entry[1] for entry in entries)
        return Artifact(
            Ref(contract=contract.id, run="local", path=output, digest=digest, rows=rows, bytes=size), folder
        )

    def rows(self, output: str) -> list[dict[str, Any]]:
        """Return a table output as a list of dictionaries."""
        return self.artifact(output).table().to_pylist()

    def ledger(self) -> Ledger:
        """Return what this work was charged, as a ledger of one attempt."""
        costs: dict[str, Cost] = {}
        for cause, cost in self.charges:
            costs[cause] = costs.get(cause, Cost()) + cost
        return Ledger.fold([Entry("local", "local", "local", costs)])


def work_for(stage: Stage[Any], folder: Path, **settings: Any) -> LocalWork:
    """Return a `LocalWork` that knows what `stage` gives."""
    return LocalWork(folder, stage.gives, **settings)


def inputs_of(**artifacts: Artifact | Sequence[Artifact]) -> Inputs:
    """Return `Inputs` from artifacts by name; a list where there are several."""
    return Inputs(
        {name: (given,) if isinstance(given, Artifact) else tuple(given) for name, given in artifacts.items()}
    )
