"""What a mixture is given, made up by hand, and a small pool of three sources with a tiny model."""

from __future__ import annotations

from typing import Any

import numpy as np

from stages.mix.mixture import Given
from stages.mix.visits import Visited

PARTS = ("a", "b", "c")


def given(**settings: Any) -> Given:
    """Return three parts of 10, 20 and 30 rows with 5, 5 and 10 answer tokens a row; no lab unless given."""
    values: dict[str, Any] = {
        "parts": PARTS,
        "part_N": np.repeat([0, 1, 2], [10, 20, 30]).astype(np.int32),
        "rows_P": np.array([10, 20, 30]),
        "tokens_P": np.array([100, 200, 600]),
        "answers_P": np.array([50, 100, 300]),
        "unit": "rows",
        "share_P": np.array([10, 20, 30]) / 60,
        "state_P": np.full(3, np.nan),
        "visited": (),
        "feature_PK": None,
        "score_P": None,
        "rng": np.random.default_rng(0),
        "notice": lambda text: None,
        "lab": None,
    }
    return Given(**(values | settings))


def visits(rows: list[tuple[int, int, float, int]]) -> Visited:
    """Return visits from (step, part, loss sum, answer tokens), of the first row of the part."""
    step, part, loss, tokens = (np.array(column) for column in zip(*rows, strict=True))
    first = np.array([0, 10, 30])
    return Visited(step, first[part], part.astype(np.int32), loss.astype(float), tokens)
