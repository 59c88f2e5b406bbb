"""The process environment that prefect, mlflow and ray read when they are imported: quiet, offline, under one folder.

Everything here is a default: a variable that the user has set is left alone. `prepare` runs before any of the three is
imported, and ends the servers that a killed command left under the same folder. `refuse_foreign_rooms` stops a start
where another project's `stages` or `data_contracts` would be imported.
"""

from __future__ import annotations

import errno
import logging
import os
import warnings
from importlib.util import find_spec
from pathlib import Path

from data_contracts.errors import ConfigError
from flows.orphans import end_orphans, mark

ROOMS = ("flows", "stages", "data_contracts")

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # its own 20 s is short for two busy cores
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the command tells it; Prefect's pages keep its log
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",  # what it says of its own server when both are ended
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def prepare(home: Path | None = None, *, offline: bool = True) -> None:
    """Set the defaults for this process and its children.

    Args:
        home: folder of the embedded store. Prefect keeps its database there, unless `PREFECT_API_URL` names a server
            or `PREFECT_HOME` another folder; its orphaned servers are ended.
        offline: whether the Hugging Face libraries may not reach for the network.

    Raises `ConfigError` where the folder cannot be written.
    """
    for name, value in {**QUIET, **(OFFLINE if offline else {})}.items():
        os.environ.setdefault(name, value)
    for library in ("transformers", "peft"):  # what they will rename is for us, who test with it, not for a run's user
        warnings.filterwarnings("ignore", category=FutureWarning, module=library)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it misses a kernel for products that are not used here
    if home is not None and "PREFECT_API_URL" not in os.environ:
        os.environ.setdefault("PREFECT_HOME", str(home / "prefect"))
        for folder in (Path(os.environ["PREFECT_HOME"]), home):  # Prefect makes the last part of the path only
            _make(folder)
        os.environ.setdefault("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "true")
        mark()
        end_orphans(Path(os.environ["PREFECT_HOME"]))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            "the folder `store.home` can be written", f"{folder}: {error.strerror}", "set `store.home` to one that can"
        ) from error


def refuse_foreign_rooms() -> None:
    """Raise `ConfigError` where `stages` or `data_contracts` would come from elsewhere than this package."""
    here = Path(__file__).resolve().parent.parent
    for room in ROOMS:
        spec = find_spec(room)
        place = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if place != here:
            raise ConfigError(
                f"`{room}` is imported from {here}",
                f"another `{room}` comes first on the Python path: {place or 'a folder without __init__.py'}",
                "unset PYTHONPATH, or start from another folder",
            )
