"""Marking one prediction against its reference, the same for generated answers and for a file of predictions."""

from __future__ import annotations

from dataclasses import dataclass

from stages.text.answers import Metric, extract


@dataclass(frozen=True)
class Mark:
    """1, 0, or None where the reference gives nothing to compare with; what was read from the prediction; a note."""

    score: float | None
    extracted: str | None
    note: str


def mark(prediction: str, reference: str, metric: Metric) -> Mark:
    """Compare what `metric` reads from both."""
    expected, found = extract(reference, metric), extract(prediction, metric)
    if expected is None:
        return Mark(None, found, "nothing to compare with: the reference holds no answer for this metric")
    if found is None:
        return Mark(0.0, None, "nothing extracted")
    return Mark(float(found == expected), found, "")
