"""An artifact is payload, validated contract, then manifest: commit or nothing.

Promises that what is committed keeps its contract and equals its digest, and that what is read equals what was
committed: sizes and (remembered) hashes are compared before use. Content files make the digest; measured files are
hashed for integrity beside it. Where files lie is left to `backends.py`, who may commit to `lease.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from data_contracts.arrow import TABLE_FILE, read_batches
from data_contracts.canonical import tree_digest
from data_contracts.contract import AnyContract, Contract, FolderContract, RecordContract
from data_contracts.errors import ArtifactError, ContractError
from data_contracts.records import MANIFEST_FILE, MEASURED, RECORD_FILE, FileEntry, Manifest, Output, Ref
from data_contracts.store.backends import Backend, sync
from data_contracts.store.hashes import Hashes
from data_contracts.store.paths import confined, files_in


def measure(name: str, contract: AnyContract, folder: Path, run: str, hashes: Hashes) -> Output:
    """Validate the payload in `folder` against its contract, make it durable and return its entry of the manifest.

    Files below `measured/` are outside the digest. Raises `ContractError` where the contract is broken.
    """
    content: list[FileEntry] = []
    measured: list[FileEntry] = []
    for path, place in files_in(folder):
        sync(place)
        entry = FileEntry(path=path, bytes=place.stat().st_size, sha256=hashes.sha256(place, fresh=True))
        (measured if path.startswith(f"{MEASURED}/") else content).append(entry)
    rows = validate(contract, folder, [entry.path for entry in content])
    digest = tree_digest(((entry.path, entry.bytes, entry.sha256) for entry in content), contract.id)
    ref = Ref(
        contract=contract.id, run=run, path=name, digest=digest, rows=rows, bytes=sum(entry.bytes for entry in content)
    )
    return Output(ref=ref, content=tuple(content), measured=tuple(measured))


def validate(contract: AnyContract, folder: Path, files: list[str]) -> int:
    """Check a payload and return its rows (a record has 1, a folder of files 0). Raises `ContractError`."""
    if isinstance(contract, Contract):
        _exactly(contract, files, [TABLE_FILE])
        return contract.validate(read_batches(folder / TABLE_FILE))
    if isinstance(contract, RecordContract):
        _exactly(contract, files, [RECORD_FILE])
        try:
            contract.type.model_validate_json((folder / RECORD_FILE).read_bytes())
        except ValidationError as error:
            raise _broken(contract, f"{RECORD_FILE}: {error}") from error
        return 1
    return _validate_folder(contract, folder, files)


def _validate_folder(contract: FolderContract, folder: Path, files: list[str]) -> int:
    missing = sorted(set(contract.needs) - set(files))
    foreign = [file for file in files if not file.endswith(contract.suffixes)]
    empty = [file for file in files if (folder / file).stat().st_size == 0]
    if missing or foreign or empty:
        raise _broken(
            contract,
            f"missing {missing or 'nothing'}, empty {empty or 'nothing'}, not allowed {foreign or 'nothing'} "
            f"(allowed: {', '.join(contract.suffixes)})",
        )
    return 0


def _exactly(contract: AnyContract, files: list[str], wanted: list[str]) -> None:
    if files != wanted:
        raise _broken(contract, f"it holds {files or 'no file'} instead of {wanted}")


def _broken(contract: AnyContract, found: str) -> ContractError:
    return ContractError(
        f"the payload keeps the contract {contract.id}", found, "mend the stage that wrote it; nothing was committed"
    )


def publish(backend: Backend, manifest: Manifest, folders: Mapping[str, Path]) -> str:
    """Put the payloads of `manifest`, then the manifest itself, and return the manifest's sha256."""
    for name, folder in folders.items():
        backend.put_folder(folder, name)
    data = manifest.model_dump_json(indent=1).encode()
    backend.put(MANIFEST_FILE, data)
    return hashlib.sha256(data).hexdigest()


def read_manifest(backend: Backend, digest: str | None) -> Manifest:
    """Return the manifest of a run's artifacts. Raises `ArtifactError` where it is missing, altered or foreign."""
    data = backend.get(MANIFEST_FILE)
    found = hashlib.sha256(data).hexdigest()
    if digest is not None and found != digest:
        raise ArtifactError(
            f"the manifest has the sha256 {digest} of its commit", f"it has {found}", "re-run the stage that made it"
        )
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise ArtifactError(
            "a manifest of this version", f"it does not parse: {error}", "re-run the stage that made it"
        ) from error


def open_verified(backend: Backend, output: Output, hashes: Hashes, *, fresh: bool = False) -> Path:
    """Return the local folder of `output` once its content files are what the manifest says.

    `fresh` reads every byte again instead of trusting remembered hashes. Raises `ArtifactError` for a missing or
    altered file; a bad cached copy is fetched once more first.
    """
    try:
        return _verified(backend.content(output), output, hashes, fresh)
    except ArtifactError:
        backend.forget(output)
        return _verified(backend.content(output), output, hashes, fresh)


def _verified(folder: Path, output: Output, hashes: Hashes, fresh: bool) -> Path:
    known = {entry.path for entry in output.content}
    added = [path for path, _ in files_in(folder) if path not in known and not path.startswith(f"{MEASURED}/")]
    if added:
        raise ArtifactError(
            f"{output.ref.path} of run {output.ref.run} holds the files that were committed, no others",
            f"{', '.join(added[:5])} came later",
            "remove them, or run the pipeline again: the stage runs anew",
        )
    for entry in output.content:
        path = confined(folder, entry.path)
        if not path.is_file():
            found = "it is missing"
        elif path.stat().st_size != entry.bytes:
            found = f"it has {path.stat().st_size} bytes, not {entry.bytes}"
        elif hashes.sha256(path, fresh=fresh) != entry.sha256:
            found = "its bytes changed"
        else:
            continue
        raise ArtifactError(
            f"{output.ref.path}/{entry.path} of run {output.ref.run} is as it was committed",
            found,
            "run the pipeline again: the stage that made it runs anew",
        )
    return folder
