"""Blank stores for tests: SQLite with its tables made once a session and copied, everything below one folder."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from data_contracts.records import StoreAddress


@functools.cache
def _template() -> Path:
    """Make the tables once: they take seconds."""
    from mlflow import MlflowClient

    folder = Path(tempfile.mkdtemp(prefix="lazytrain-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    MlflowClient(f"sqlite:///{folder / 'mlflow.db'}").search_experiments()
    return folder / "mlflow.db"


def blank(folder: Path) -> StoreAddress:
    """Return the address of an empty store under `folder`."""
    database = folder / "store" / "mlflow.db"
    if not database.exists():
        database.parent.mkdir(parents=True)
        shutil.copy(_template(), database)
    return StoreAddress(tracking_uri=f"sqlite:///{database}", work_uri=str(folder / "work"))


def cold(folder: Path) -> StoreAddress:
    """Return the address of a store whose database does not exist yet."""
    return StoreAddress(tracking_uri=f"sqlite:///{folder / 'store' / 'mlflow.db'}", work_uri=str(folder / "work"))
