"""Numbers for people, written in one way everywhere: on the screen, in Prefect and in reports."""

from __future__ import annotations

Value = str | int | float | bool | None


def text(value: Value) -> str:
    """Return a value for people: four significant digits, thousands apart, a dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**9 else f"{value:.3g}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10**9 else f"{value:.3g}"
    return value


def size(count: int) -> str:
    """Return bytes for people, in decimal units."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:  # three digits would show it as a thousand
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def duration(seconds: float) -> str:
    """Return seconds for people."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
