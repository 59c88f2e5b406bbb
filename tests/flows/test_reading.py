"""Whether a way of choosing reads scores: where it does not, the pool is not scored and nothing is charged for it."""

from __future__ import annotations

from typing import Any

import pytest

from data_contracts.config import SelectConfig
from flows.reading import reads_scores


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        ({"selector": {"method": "random"}, "fraction": 1.0}, False),
        ({"selector": {"method": "top_k"}, "count": 0, "include_target": True}, False),
        ({"selector": {"method": "random"}, "noise": {"method": "answer_fit"}}, False),
        ({"selector": {"method": "random"}, "mixture": {"method": "odm"}}, False),
        ({"selector": {"method": "top_k"}}, True),
        ({"selector": {"method": "k_center"}}, True),
        ({"selector": {"method": "random"}, "noise": {"method": "loss"}}, True),
        ({"selector": {"method": "random"}, "mixture": {"method": "gst"}}, True),
    ],
)
def test_scores_are_read_by_what_cannot_do_without_them(settings: dict[str, Any], reads: bool) -> None:
    assert reads_scores(SelectConfig(**settings)) is reads
