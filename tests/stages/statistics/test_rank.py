"""Rank correlation against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from stages.statistics.rank import spearman


def test_rank_correlation_equals_scipys_with_ties() -> None:
    random = np.random.default_rng(0)
    left, right = random.integers(0, 5, 100), random.normal(size=100).astype(np.float32)
    assert spearman(left, right) == pytest.approx(spearmanr(left, right).statistic, abs=1e-12)
    assert spearman(np.ones(5), right[:5]) is None
