"""Folders that several processes look at, measure and remove at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data_contracts.records import OUTSIDE_FILE, OUTSIDE_PREFIX
from data_contracts.store.folders import discard, size_of, untouched_seconds

AT_ONCE, ROUNDS = 3, 60


def test_a_folder_is_removed_by_several_at_once_and_measured_meanwhile(tmp_path: Path) -> None:
    outside = tmp_path / f"{OUTSIDE_PREFIX}elsewhere"
    with ThreadPoolExecutor(AT_ONCE + 1) as pool:
        for number in range(ROUNDS):
            place = tmp_path / str(number)
            for branch in range(6):
                deep = place / f"claim-{branch}" / "outputs" / "rows"
                deep.mkdir(parents=True)
                (deep / "part.arrow").write_bytes(b"rows")
            (place / "claim-0" / "scratch").mkdir()
            (place / "claim-0" / "scratch" / OUTSIDE_FILE).write_text(str(outside))
            outside.mkdir()
            together = threading.Barrier(AT_ONCE + 1)

            def measured(place: Path = place, together: threading.Barrier = together) -> None:
                together.wait()
                while place.exists():
                    size_of(place)
                    untouched_seconds(place)

            def removed(place: Path = place, together: threading.Barrier = together) -> None:
                together.wait()
                discard(place)

            asked = [pool.submit(removed) for _ in range(AT_ONCE)] + [pool.submit(measured)]
            for answer in asked:
                answer.result()
            assert not place.exists()
            assert not outside.exists(), "the folder elsewhere that its scratch named"
