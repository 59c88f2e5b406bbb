"""Stages on plain folders: what `lazytrain ingest --pool …` and its kin use instead of a store.

The same stages, the same contracts, no MLflow and no server. Outputs stand under `<out>/<name>/outputs`, validated, as
tables (`data.arrow`) and records (`record.json`). Nothing is committed and nothing reused.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from data_contracts.arrow import rows_of
from data_contracts.canonical import canonical
from data_contracts.config import Config, ModelConfig
from data_contracts.config_file import parse
from data_contracts.errors import ArtifactError, ConfigError
from data_contracts.ledger import Entry, Ledger
from data_contracts.records import CONTRACTS, RECORD_FILE, Summary
from data_contracts.store.artifacts import measure
from data_contracts.store.hashes import Hashes
from flows.command.screen import console, screen, show
from flows.environment import prepare
from stages.stage import Artifact, Inputs, Work, find_stage
from stages.work import Desk

SHOWN_ROWS = 20
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class Plain:
    """Stages run one after another under `out`, each on what the ones before it made.

    Args:
        out: where outputs go; what an earlier command left there under the same name is replaced.
        values: the configuration's sections.
    """

    def __init__(self, out: Path, values: Mapping[str, Any]) -> None:
        prepare()
        self.config: Config = parse(dict(values), "the options of this command")
        self.out, self.root = out, Path.cwd()
        self._entries: list[Entry] = []
        out.mkdir(parents=True, exist_ok=True)

    def files(self, split: str, names: Sequence[Path]) -> dict[str, Artifact]:
        """Read plain files as one split: `examples`, `quarantine`, and `tokens` where the configuration has a model."""
        from stages.ingest.plain import GIVES, ingest_files

        model = None if self.config.model.path == "." else self.config.model

        def work(desk: Work) -> Summary:
            return ingest_files(
                [str(name) for name in names], model=model, settings=self.config.ingest, work=desk, root=self.root
            )

        made, _ = self._run(split, GIVES, work, optional=frozenset({"pool_tokens"}))
        return {name.replace("pool_tokens", "tokens").replace("pool", "examples"): item for name, item in made.items()}

    def base(self) -> Artifact:
        """Pin the model and return it as the input `base`."""
        from stages.model.pin import pin_model

        pin = pin_model(self.config.model, self.root, resize=self.config.ingest.resize_embeddings)
        folder = self.out / "base"
        folder.mkdir(exist_ok=True)
        (folder / RECORD_FILE).write_bytes(canonical(pin.model_dump(mode="json")))
        return self.artifact("base", "base", folder)

    def call(self, verb: str, **inputs: Artifact | Sequence[Artifact] | None) -> tuple[dict[str, Artifact], Summary]:
        """Run stage `verb` and return its outputs by name and its summary, which is also shown."""
        stage = find_stage(verb)
        given = {
            name: (value,) if isinstance(value, Artifact) else tuple(value)
            for name, value in inputs.items()
            if value is not None
        }
        config = stage.config(**self.config.slice(verb))
        return self._run(
            verb, stage.gives, lambda desk: stage.run(config, Inputs(given), desk), optional=stage.optional
        )

    def _run(
        self, name: str, gives: Mapping[str, str], work: Callable[[Work], Summary], *, optional: frozenset[str]
    ) -> tuple[dict[str, Artifact], Summary]:
        place = self.out / name
        shutil.rmtree(place, ignore_errors=True)
        desk = Desk(
            place,
            gives,
            seed=self.config.seed,
            knobs={"root": str(self.root)},
            reporter=screen(),
            spent=lambda refs: Ledger.fold(self._entries),
            registry=_no_registry,
            earlier=lambda: None,
        )
        summary = work(desk)
        made = {
            output: self.artifact(output, gives[output], folder) for output, folder in desk.finish(optional).items()
        }
        self._entries.append(Entry(name, name, name, dict(desk.costs)))
        shutil.rmtree(desk.folder, ignore_errors=True)
        show(summary)
        return made, summary

    def artifact(self, name: str, contract: str, folder: Path) -> Artifact:
        """Validate what a folder holds against its contract and return it as a stage is given it."""
        output = measure(name, CONTRACTS[contract], folder, "plain", Hashes(self.out / "hashes.sqlite"))
        return Artifact(output.ref, folder)


def _no_registry() -> Any:
    raise ArtifactError("a stage on plain files changes nothing elsewhere", "it asked for the registry", "use a run")


def model_of(name: str | None) -> dict[str, Any]:
    """Return the section `model` for a folder or hub name; without one, the place-holder that nothing reads.

    Raises `ConfigError` for what is neither a folder that is there nor a name a hub could have.
    """
    if name is None:
        return {"path": "."}
    folder = Path(name).expanduser()
    if folder.is_dir():
        return ModelConfig(path=name).model_dump()
    beside = get_close_matches(folder.name, [item.name for item in _folders(folder.parent)], n=1, cutoff=0.75)
    if beside or HUB_NAME.fullmatch(name) is None:
        near = f"; did you mean {folder.parent / beside[0]}?" if beside else ""
        raise ConfigError(
            "the model is a folder or a hub name",
            f"{name} is no folder{near}",
            "give the folder that holds config.json, or `organisation/model` (with its own name spelled out)",
        )
    return {"hub": name}


def _folders(place: Path) -> list[Path]:
    return [item for item in place.iterdir() if item.is_dir()] if place.is_dir() else []


def show_refused(quarantine: Artifact) -> int:
    """List the rows that are not used, the first of many, and return how many there are."""
    count = 0
    for row in rows_of(quarantine.batches()):
        count += 1
        if count <= SHOWN_ROWS:
            place = f"line {row['line']}" if row["line"] is not None else f"row {row['row']}"
            at = f" {row['field']}" if row["field"] else ""
            console().print(f"not used: {row['file']} {place}{at}: {row['reason']}: {row['detail']}", markup=False)
    if count > SHOWN_ROWS:
        console().print(f"… and {count - SHOWN_ROWS} more in {quarantine.folder}", markup=False)
    return count


def ids_of(examples: Artifact) -> dict[str, str]:
    """Return example_id → the id that the file gave the row, or its file and row where it gave none."""
    found = {}
    for row in rows_of(examples.batches()):
        given = json.loads(row["extra"] or "{}").get("id")
        found[row["example_id"]] = f"{row['file']}:{row['row']}" if given is None else str(given)
    return found


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested sections put over one another, the later winning."""
    values: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            old = values.get(name)
            values[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return values


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `section.key` names into nested sections. Raises `ConfigError` for a name without a section."""
    layers: list[dict[str, Any]] = []
    for name, value in settings.items():
        parts = name.split(".")
        if len(parts) < 2:
            raise ConfigError("a setting as section.key=value", f"it is {name!r}", "such as --set ingest.dedupe=exact")
        layer: dict[str, Any] = {parts[-1]: value}
        for part in reversed(parts[:-1]):
            layer = {part: layer}
        layers.append(layer)
    return merged(*layers)
