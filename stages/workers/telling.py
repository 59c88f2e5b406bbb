"""What passes between a process and its workers as plain data: a function's name, and why something failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from data_contracts import errors
from data_contracts.errors import LazyTrainError


def function_of(entry: str) -> Callable[..., Any]:
    """Import and return what `entry`, "package.module:name", names."""
    module, _, name = entry.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def told_of(error: Exception) -> dict[str, Any]:
    """Return an error as plain data: a typed one by its parts, another by its traceback."""
    if isinstance(error, LazyTrainError):
        return {"kind": type(error).__name__, "parts": [error.promised, error.found, error.remedy]}
    return {"kind": "", "parts": ["".join(traceback.format_exception(error))]}


def error_of(told: Mapping[str, Any]) -> LazyTrainError | None:
    """Return the typed error that was told, None where it was another."""
    kind = getattr(errors, told["kind"], None) if told["kind"] else None
    return kind(*told["parts"]) if kind is not None else None
