"""A real small model, and rows of tokens to put through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_contracts.config import ModelConfig
from data_contracts.records import ModelPin
from stages.model.batch import Row
from stages.model.load import load_model, pin_model


@pytest.fixture(scope="session")
def pin(shared: Path) -> ModelPin:
    """The pinned stories260k."""
    return pin_model(ModelConfig(path="data/stories260k"), shared)


@pytest.fixture(scope="session")
def model(pin: ModelPin) -> Any:
    """stories260k in float32; do not change it."""
    return load_model(pin)


@pytest.fixture(scope="session")
def model64(pin: ModelPin) -> Any:
    """stories260k in float64; do not change it."""
    return load_model(pin, dtype=torch.float64)


def rows_of(*lengths: int, seed: int = 0, vocabulary: int = 500) -> list[Row]:
    """Random rows of the lengths given, about half of each supervised, the last token always."""
    draw = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        mask = draw.random(length) < 0.5
        mask[-1] = True
        rows.append(Row(f"{number:032x}", draw.integers(3, vocabulary, length), mask))
    return rows
