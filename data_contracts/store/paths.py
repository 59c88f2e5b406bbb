"""Confinement: a relative path of a payload stays inside its folder.

Promises that a path from a manifest, a reference or a stage never leaves the folder it is relative to: no absolute
path, no `..`, no drive, no NUL, no symbolic link out. Everything that turns such text into a `Path` goes through here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from data_contracts.errors import ArtifactError

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@=+ -]{0,199}")


def relative(text: str) -> PurePosixPath:
    """Return `text` as a plain relative path with / between parts. Raises `ArtifactError` for any other form."""
    parts = text.split("/")
    if not text or not all(_PART.fullmatch(part) and not part.endswith((" ", ".")) for part in parts):
        raise ArtifactError(
            "a payload's path is relative, of letters, digits and _.@=+- with / between parts",
            f"the path {text!r}",
            "name the file plainly; it stays inside its output's folder",
        )
    return PurePosixPath(*parts)


def confined(folder: Path, text: str) -> Path:
    """Return `folder / text` once it is certain to lie inside `folder`, links followed. Raises `ArtifactError`."""
    path = folder / relative(text)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ArtifactError(
            f"{text!r} lies inside its folder", "a symbolic link leads out of it", "store the file, not a link"
        )
    return path


def files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (relative path, path) of every file below `folder`, sorted. Raises `ArtifactError` for a link or device."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise ArtifactError("a payload holds plain files", f"{name!r} is a link or a device", "store a plain file")
        if path.is_file():
            relative(name)
            yield name, path
