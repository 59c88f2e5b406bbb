"""Memory that does not grow with the pool, and rows a second."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = """
import json, resource, sys, time
from pathlib import Path
from data_contracts.config import IngestConfig
from stages.ingest.plain import GIVES, ingest_files
from tests.local_work import LocalWork
folder = Path(sys.argv[1])
work = LocalWork(folder / "work", GIVES)
start = time.process_time()
ingest_files(["pool.jsonl"], model=None, settings=IngestConfig(dedupe=sys.argv[2]), work=work, root=folder)
spent = time.process_time() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"rows": work.artifact("pool").ref.rows, "peak": peak, "seconds": spent}))
"""


def measure(folder: Path, rows: int, words: int, dedupe: str) -> dict[str, float]:
    folder.mkdir()
    rng = random.Random(0)
    known = [f"{rng.randrange(10**6)}" for _ in range(5000)]
    with (folder / "pool.jsonl").open("w") as file:
        for _ in range(rows):
            row = {"prompt": " ".join(rng.choices(known, k=10)), "completion": " ".join(rng.choices(known, k=words))}
            file.write(json.dumps(row) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), dedupe], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout) | {"bytes": (folder / "pool.jsonl").stat().st_size}


@pytest.mark.slow
@pytest.mark.parametrize(("dedupe", "allowed"), [("exact", 24e6), ("near", 60e6)])
def test_peak_memory_does_not_grow_with_the_texts(tmp_path: Path, dedupe: str, allowed: float) -> None:
    """Eight times the rows, 62 MB more text: memory grows by what is left to fill of a run and of the indexes' caches.

    A run is 16 MB, the cache of an index 32 MB; the small input fills half a run and a part of the caches.
    """
    small = measure(tmp_path / "small", 2500, 500, dedupe)
    large = measure(tmp_path / "large", 20000, 500, dedupe)
    assert large["rows"] == 20000
    assert large["bytes"] - small["bytes"] > 60e6
    assert large["peak"] - small["peak"] < allowed
