"""Metrics of a plain file into the tracking store, each findable under the name it has in the file.

Names and values are checked before anything is stored. MLflow takes fewer characters than people use (`hits@1`), so
each metric is stored under a legal name, one a name; the original is kept beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_contracts.cost import Frozen
from data_contracts.errors import InputError
from data_contracts.records import StoreAddress, Summary
from data_contracts.store import Store
from data_contracts.store.names import legal


class StoredMetrics(Frozen):
    """What was stored: the run, and for each metric its legal name and value."""

    run: str
    names: dict[str, str]
    values: dict[str, float]


def store_metrics(path: Path, address: StoreAddress) -> StoredMetrics:
    """Store the metrics of a JSON object file in a run of their own.

    Raises `InputError`, with nothing stored, for a file that is no object of finite numbers, a name given twice or an
    empty name.
    """
    values = read_metrics(path)
    names = {name: legal(name) for name in values}
    store = Store(address)
    run = store.open_run("promote-metrics", {"metrics": path.name})
    try:
        store.close_run(run, "FINISHED", Summary(title=f"metrics of {path.name}", facts=dict(values)))
    except BaseException:
        store.close_run(run, "FAILED", reason="the metrics could not be stored")
        raise
    return StoredMetrics(run=run, names=names, values=values)


def stored_metrics(run: str, address: StoreAddress) -> dict[str, float]:
    """Return a run's metrics under the names of their file, as a gate asks for them."""
    summary = Store(address).run_summary(run)
    facts = summary.facts if summary is not None else {}
    return {name: float(value) for name, value in facts.items() if isinstance(value, (int, float))}


def read_metrics(path: Path) -> dict[str, float]:
    """Return the metrics of a JSON object file. Raises `InputError` as `store_metrics` does."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_once)
    except (OSError, ValueError) as error:
        raise _bad(path, str(error)) from error
    if not isinstance(values, dict) or not values:
        raise _bad(path, "it holds no metric")
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not name or not number or not math.isfinite(value):
            raise _bad(path, f"{name!r} is {value!r}")
    return {name: float(value) for name, value in values.items()}


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    return found


def _bad(path: Path, found: str) -> InputError:
    return InputError("one JSON object of metric names and finite numbers", f"{path.name}: {found}", "mend the file")
