"""What the user named as data, as a list of files: files, folders, `datasets` directories, hub names.

A file is known by a label: the end of its path that is unique in its split, so no path of this machine travels and the
identity of the work holds labels and content only. A hub name is `hub:owner/name[@revision][#split]`, resolved to a
commit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from data_contracts.canonical import file_sha256
from data_contracts.errors import InputError
from stages.ingest.compressed import bare_suffix
from stages.ingest.readers import SUFFIXES

_HUB = re.compile(r"hub:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?(?:#(?P<split>[\w.-]+))?\Z")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")


@dataclass(frozen=True)
class Source:
    """One file to read: its label in tables, and where it is."""

    label: str
    path: Path


def files_of(names: Sequence[str], root: Path) -> list[Source]:
    """Return the files that `names` stand for, in order; those of a folder sorted by path.

    Raises `InputError` for a name that is nothing, a folder without a file of a known kind, or a hub out of reach.
    """
    found: list[tuple[PurePosixPath, Path]] = []
    for name in names:
        found += _hub_files(name) if name.startswith("hub:") else _local_files(name, root)
    return [Source(label, path) for label, (_, path) in zip(_labels([full for full, _ in found]), found, strict=True)]


def digests(names: Sequence[str], root: Path) -> list[list[str]]:
    """Return what `names` stand for by content, in order: [label, sha256] of a file, [name, commit] of a hub name."""
    made: list[list[str]] = []
    files = iter(files_of([name for name in names if not name.startswith("hub:")], root))
    for name in names:
        if name.startswith("hub:"):
            parts = _hub_parts(name)
            made.append([f"hub:{parts['name']}#{parts['split'] or 'train'}", _commit(name, parts)])
            continue
        for _ in _local_files(name, root):
            source = next(files)
            made.append([source.label, file_sha256(source.path)])
    return made


def _local_files(name: str, root: Path) -> list[tuple[PurePosixPath, Path]]:
    path = root / Path(name).expanduser()
    if path.is_file():
        return [(PurePosixPath(path.resolve().parent.as_posix(), path.name), path)]
    if not path.is_dir():
        hint = " (a hub name starts with hub:)" if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""
        raise InputError("data names a file, a folder or a hub name", f"{name} is none of them{hint}", "check the path")
    base = PurePosixPath(path.resolve().as_posix())
    if (path / "dataset_dict.json").is_file():
        return _splits(path, name, root)
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        listed = _json(path / "state.json", name).get("_data_files", [])
        files = [path / Path(item["filename"]).name for item in listed]
    else:
        inside = (file for file in path.rglob("*") if not any(part[0] == "." for part in file.relative_to(path).parts))
        files = sorted(file for file in inside if file.is_file() and bare_suffix(file.name) in SUFFIXES)
    if not files:
        raise InputError(f"the folder {name} holds data", "no file of a known kind is in it", ", ".join(SUFFIXES))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InputError(f"the dataset {name} is whole", f"{missing[0]} is missing", "save it again")
    return [(base / file.relative_to(path).as_posix(), file) for file in files]


def _splits(path: Path, name: str, root: Path) -> list[tuple[PurePosixPath, Path]]:
    splits = _json(path / "dataset_dict.json", name).get("splits", [])
    chosen = "train" if "train" in splits else splits[0] if len(splits) == 1 else None
    if chosen is None:
        raise InputError(
            f"one split of the dataset {name}", f"it has {', '.join(splits)}", f"name one: {name}/{splits[0]}"
        )
    return _local_files(f"{name}/{chosen}", root)


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
        found = "no object"
    except (OSError, ValueError) as error:
        found = str(error)
    raise InputError(f"{name} is a saved dataset", f"its {path.name} cannot be read: {found}", "save it again")


def _labels(paths: Sequence[PurePosixPath]) -> list[str]:
    """Return for each path its shortest end that no other path shares."""
    labels = []
    for path in paths:
        others = [other for other in paths if other != path and other.name == path.name]
        size = 1
        while size < len(path.parts) and any(other.parts[-size:] == path.parts[-size:] for other in others):
            size += 1
        labels.append("/".join(path.parts[-size:]))
    return labels


def _hub_parts(name: str) -> dict[str, str | None]:
    match = _HUB.match(name)
    if match is None:
        raise InputError("a hub name is hub:owner/name[@revision][#split]", f"found {name!r}", "write it so")
    return match.groupdict()


def _commit(name: str, parts: dict[str, str | None]) -> str:
    revision = parts["revision"]
    if revision and _COMMIT.match(revision):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # the network's errors, too

    try:
        sha = HfApi().dataset_info(str(parts["name"]), revision=revision).sha
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise _out_of_reach(name, error) from error
    if sha is None:
        raise _out_of_reach(name, "it has no commit")
    return sha


def _hub_files(name: str) -> list[tuple[PurePosixPath, Path]]:
    parts = _hub_parts(name)
    commit, split = _commit(name, parts), parts["split"] or "train"
    import datasets

    try:
        made = datasets.load_dataset(str(parts["name"]), revision=commit, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _out_of_reach(name, error) from error
    files = [Path(item["filename"]) for item in made.cache_files]
    return [(PurePosixPath("hub:", str(parts["name"]), f"{split}-{i}.arrow"), file) for i, file in enumerate(files)]


def _out_of_reach(name: str, why: object) -> InputError:
    return InputError(
        f"the dataset {name} can be read from the hub",
        f"it cannot: {str(why).splitlines()[0] if str(why) else type(why).__name__}",
        "check the name and the network; a gated dataset needs its licence accepted and HF_TOKEN set",
    )
