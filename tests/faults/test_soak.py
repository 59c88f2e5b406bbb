"""Faults 6 and 13, on whole pipelines: the short form of `benchmarks.soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import soak


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.timeout(1200)
def test_06_13_killed_runs_are_resumed_to_the_same_result(tmp_path: Path, shared: Path) -> None:
    figures = soak.run(tmp_path, shared, kills=3, seed=1, workers=[0])
    assert figures["kills"] == 3
    assert figures["resumes"] >= 1
    assert figures["digests_equal"]
    assert figures["committed_twice"] == 0
    assert figures["left_running"] == 0
