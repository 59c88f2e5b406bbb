"""The connection to Ray: the caller's, the cluster at RAY_ADDRESS, or a local one on loopback that ends here.

A local cluster is its user's alone: its own folder, its own processes, gone with the block or, where this process is
killed, soon after it; the next attempt removes the folder.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_contracts.errors import TransientError
from data_contracts.records import OUTSIDE_FILE, OUTSIDE_PREFIX

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
"""Whether a node may have others beside it, whatever the name says. Where it may not, Ray's processes know it by
127.0.0.1 and most of them listen there alone; else every port of a local cluster is open to the network."""
LONGEST_ROOT = 36
"""Characters of Ray's folder: its socket's path must stay within the 107 that a unix socket may have."""


def settle() -> str | None:
    """Set what Ray reads once, when it is imported, and return the address of a cluster that stands; None: a local one
    would be on loopback."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        os.environ.setdefault(*LOOPBACK)
    return address


@contextmanager
def cluster(workers: int, folder: Path) -> Iterator[Path | None]:
    """A connection to Ray: the caller's, else the cluster at RAY_ADDRESS, else a local one that ends here.

    Gives the folder of a local one, None for another.
    """
    address = settle()
    import ray

    if ray.is_initialized():
        yield None
        return
    root = None if address else short_folder(folder)
    local: dict[str, Any] = {
        "num_cpus": max(workers, os.cpu_count() or 1),  # ranks may share a core; the controller takes none
        "include_dashboard": False,
        "_temp_dir": str(root),
        "runtime_env": {"env_vars": {"PYTHONPATH": _import_path(), "PYTHONSAFEPATH": "1"}},
    }
    try:
        try:
            ray.init(log_to_driver=False, **({"address": address} if address else local))
        except Exception as error:  # Ray has no class of its own for a node that does not come up
            raise TransientError(
                f"Ray is reached at {address}" if address else "a local Ray starts",
                " ".join(str(error).split())[:400] or type(error).__name__,
                "look at free disk and memory of this machine, or at the cluster, and run again",
            ) from error
        yield root
    finally:
        ray.shutdown()
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
            (folder / OUTSIDE_FILE).unlink(missing_ok=True)


def short_folder(folder: Path) -> Path:
    """Return a new folder for Ray's sockets, and remove the one that a killed attempt left."""
    note = folder / OUTSIDE_FILE
    if note.is_file():
        shutil.rmtree(note.read_text(encoding="utf-8"), ignore_errors=True)
    parent = folder.resolve() if len(str(folder.resolve())) < LONGEST_ROOT - 12 else Path(tempfile.gettempdir())
    if len(str(parent)) > LONGEST_ROOT - 12:
        parent = Path("/tmp")  # noqa: S108 - a private folder is made in it
    root = Path(tempfile.mkdtemp(prefix=OUTSIDE_PREFIX, dir=parent))
    note.write_text(str(root), encoding="utf-8")
    return root


def _import_path() -> str:
    """Return the PYTHONPATH under which a worker finds this project."""
    own = str(Path(__file__).resolve().parent.parent.parent)
    return os.pathsep.join(part for part in (own, os.environ.get("PYTHONPATH", "")) if part)


def cpus_a_worker(nodes: Sequence[Mapping[str, Any]], workers: int) -> int:
    """Return the CPUs that every worker can have wherever it is put, at least 1; torch uses as many threads."""
    cpus = [int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    useful = [count for count in cpus if count > 0]
    return max(1, min(useful) // math.ceil(workers / len(useful))) if useful else 1
