"""Does scoring a hundred times as many rows take a hundred times as long, and no more memory?

Pools of 1,000 to 100,000 rows are scored by the stage itself with influence from a small real model, each in a process
of its own, on one thread. Rows are real instructions, cut short; each is one of 4,000 with one token replaced, so that
no two are alike. Pools are written before and mapped, as the store gives them.

    time_exponent   slope of log CPU seconds over log rows; `last_exponent` between the two largest
    memory_ratio    anonymous memory held beyond that at the stage's start, at its peak: the largest pool over the
                    smallest (pages of the mapped pool are the system's to drop); `resident_ratio` counts all pages
                    of the process, its libraries' too

    python -m benchmarks.scoring_scale [--quick] [--data FOLDER] [--method NAME]
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.chain import report
from benchmarks.forked import in_own_process
from benchmarks.options import Options
from benchmarks.scoring import read_rows

if TYPE_CHECKING:
    from stages.model.batch import Row
    from stages.stage import Artifact

LONGEST, SHOWN, TARGET_ROWS, BATCH_TOKENS = 512, 24, 16, 4096
"""Rows are cut to the `SHOWN` tokens around the beginning of their answer."""
SAMPLE_SECONDS = 0.005


def cut(row: Row) -> Row:
    """Return the tokens around the beginning of the answer."""
    from stages.model.batch import Row

    first = int(np.argmax(row.answer_mask))
    part = slice(max(0, first - SHOWN // 2), first + SHOWN // 2)
    return Row(row.example_id, row.input_ids[part], row.answer_mask[part])


def write_pool(folder: Path, rows: list[Row], count: int) -> Artifact:
    """Write a tokens table of `count` rows made from `rows`; one batch in memory."""
    from tests.local_work import LocalWork

    work, random = LocalWork(folder, {"t": "tokens"}), np.random.default_rng(0)
    with work.writer("t") as writer:
        for index in range(count):
            row = rows[index % len(rows)]
            ids = row.input_ids.copy()
            ids[int(random.integers(len(ids)))] = int(random.integers(3, 512))
            writer.append(
                {
                    "example_id": f"{index:032x}",
                    "source": "all",
                    "input_ids": ids.tolist(),
                    "answer_mask": row.answer_mask.tolist(),
                    "n_tokens": len(ids),
                    "n_answer_tokens": int(row.answer_mask.sum()),
                    "truncated": False,
                }
            )
    return work.artifact("t")


def pinned(folder: Path, model: Path) -> Artifact:
    """Return a model of this machine as the stage takes it."""
    from data_contracts.config import ModelConfig
    from stages.model.load import pin_model
    from tests.local_work import LocalWork

    work = LocalWork(folder, {"base": "base"})
    work.record("base", pin_model(ModelConfig(path=model.name), model.parent))
    return work.artifact("base")


@contextmanager
def anonymous_peak() -> Iterator[list[int]]:
    """Give [before, peak] of the anonymous resident memory inside, bytes, seen every few milliseconds."""

    def held() -> int:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise OSError("/proc/self/status has no RssAnon")

    seen, ended = [held(), held()], threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            seen[1] = max(seen[1], held())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        ended.set()
        watcher.join()


def score(folder: Path, method: str, inputs: dict[str, Artifact]) -> dict[str, Any]:
    """Score the pool in this process; return CPU seconds and memory."""
    from data_contracts.config import ScoreConfig
    from stages.meter.memory import PeakMeter
    from stages.score.stage import STAGE, ScoreSlice
    from tests.local_work import inputs_of, work_for

    config = ScoreConfig(scorer={"method": method}, batch_tokens=BATCH_TOKENS)
    with PeakMeter() as meter, anonymous_peak() as anonymous:
        began = time.process_time()
        STAGE.run(ScoreSlice(seed=0, score=config), inputs_of(**inputs), work_for(STAGE, folder))
        seconds = time.process_time() - began
    return {"seconds": seconds, "anonymous": anonymous[1] - anonymous[0], "resident": meter.bytes}


def main() -> None:
    """Score pools of growing size and report how time and memory grow."""
    parser = Options(__doc__, "up to 16,000 rows")
    parser.add_argument("--method", default="influence")
    options = parser.read()
    import torch

    torch.set_num_threads(1)
    sizes = (1_000, 4_000, 16_000) if options.quick else (1_000, 10_000, 100_000)
    small = (options.data / "stories260k").resolve()
    rows = [cut(row) for row in read_rows(options.data, small, TARGET_ROWS + 4_000, LONGEST)]
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        fixed = {
            "base": pinned(home / "base", small),
            "target_tokens": write_pool(home / "target", rows[:TARGET_ROWS], 16),
        }
        found: dict[int, dict[str, Any]] = {}
        for size in (sizes[0], *sizes):  # the first one fills caches
            pool = write_pool(home / f"pool{len(found)}-{size}", rows[TARGET_ROWS:], size)
            place = home / f"work{len(found)}-{size}"
            found[size] = in_own_process(partial(score, place, options.method, {**fixed, "pool_tokens": pool}))
    rows_log, seconds_log = np.log(np.array(sizes, dtype=float)), np.log([found[size]["seconds"] for size in sizes])
    for size in sizes:
        one = found[size]
        print(
            f"{size:7d} rows {one['seconds']:8.2f} CPU s {size / one['seconds']:8.0f} rows/s   anonymous "
            f"+{one['anonymous'] / 1e6:7.1f} MB   resident {one['resident'] / 1e6:7.1f} MB"
        )
    report(
        "scoring_scale",
        {
            "memory_ratio": round(found[sizes[-1]]["anonymous"] / found[sizes[0]]["anonymous"], 3),
            "resident_ratio": round(found[sizes[-1]]["resident"] / found[sizes[0]]["resident"], 3),
            "time_exponent": round(float(np.polyfit(rows_log, seconds_log, 1)[0]), 3),
            "last_exponent": round(float((seconds_log[-1] - seconds_log[-2]) / (rows_log[-1] - rows_log[-2])), 3),
            "seconds": {size: round(found[size]["seconds"], 2) for size in sizes},
            "anonymous_bytes": {size: found[size]["anonymous"] for size in sizes},
            "method": options.method,
        },
    )


if __name__ == "__main__":
    main()
