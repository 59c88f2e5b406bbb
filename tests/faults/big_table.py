"""A flow whose five stages hand on one large table: python -m tests.faults.big_table FOLDER BYTES; figures as JSON.

The stages are toys, all else is real: the Prefect flow and its tasks, the runner, the store. The anonymous memory of
the flow's process is watched (pages of mapped files are the system's cache, and go when somebody needs them).
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.cost import Frozen
from data_contracts.records import Decision, Origin, Ref, Request, StoreAddress, Summary
from stages.stage import Inputs, Stage, Takes, Work

ROW_BYTES = 96
BATCH = 50_000


class RowsSlice(Frozen):
    rows: int


def batches(rows: int) -> Iterator[pa.Table]:
    """Yield `rows` rows of a selection."""
    for start in range(0, rows, BATCH):
        count = min(BATCH, rows - start)
        places = np.arange(start, start + count)
        yield pa.table(
            {
                "rank": places,
                "example_id": [f"{place:032x}" for place in places.tolist()],
                "weight": np.ones(count),
                "repeats": np.ones(count, dtype=np.int64),
                "order": np.zeros(count, dtype=np.int64),
                "mixture": ["a mixture"] * count,
                "gain": pa.nulls(count, pa.float64()),
                "reason": ["a reason of some length"] * count,
            }
        )


class MakeTable(Stage[RowsSlice]):
    verb = "select"
    config = RowsSlice
    takes = {}
    gives = {"selection": "selection"}

    def run(self, config: RowsSlice, inputs: Inputs, work: Work) -> Summary:
        """Write the table."""
        with work.writer("selection") as writer:
            for part in batches(config.rows):
                writer.extend(part)
        return Summary(title="made")


class ReadTable(Stage[RowsSlice]):
    config = RowsSlice
    takes = {"selection": Takes("selection")}
    gives = {"decision": "decision"}

    def __init__(self, verb: str) -> None:
        self.verb = verb  # type: ignore[misc]

    def run(self, config: RowsSlice, inputs: Inputs, work: Work) -> Summary:
        """Read every row."""
        total = sum(float(batch.column("weight").to_numpy().sum()) for batch in inputs.one("selection").batches())
        work.record("decision", Decision(action="continue", reason="read", round=0, numbers={"total": total}))
        return Summary(title="read")


VERBS = ("score", "train", "govern", "evaluate")
STAGES: dict[str, Stage[Any]] = {"select": MakeTable(), **{verb: ReadTable(verb) for verb in VERBS}}


def anonymous_bytes() -> int:
    """Return what this process holds that is not backed by a file."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Watch(threading.Thread):
    """Keeps the largest value seen."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.01):
            self.peak = max(self.peak, anonymous_bytes())


def main(folder: Path, size: int) -> dict[str, Any]:
    """Run the flow and return the figures."""
    from flows.environment import prepare

    prepare(folder / "home")
    from prefect import flow

    from flows.calling import stage_call
    from stages import runner

    runner.find_stage = lambda verb: STAGES[verb]
    address = StoreAddress(tracking_uri=f"sqlite:///{folder}/home/mlflow.db", work_uri=str(folder / "home" / "work"))
    parameters: list[int] = []

    def call(verb: str, rows: int, inputs: dict[str, tuple[Ref, ...]]) -> Any:
        request = Request(
            verb=verb, config={"rows": rows}, inputs=inputs, store=address, origin=Origin(name=verb), knobs={}
        )
        parameters.append(len(request.model_dump_json()))
        return stage_call(request, "big")

    @flow(name="big", persist_result=False)
    def big(rows: int) -> Any:
        made = call("select", rows, {})
        for verb in VERBS:
            call(verb, rows, {"selection": made.ref("selection")})
        return made

    big(BATCH)  # everything is loaded, and a batch was handled
    before, watch = anonymous_bytes(), Watch()
    watch.start()
    made = big(size // ROW_BYTES)
    watch.over.set()
    watch.join()
    files = [path for path in folder.rglob("*") if path.is_file()]
    tables = [path for path in files if path.suffix == ".arrow" and path.stat().st_size > size // 4]
    return {
        "table_bytes": made.refs["selection"].bytes,
        "rss_growth_bytes": watch.peak - before,
        "largest_parameters_bytes": max(parameters),
        "large_tables_on_disk": len(tables),
        "other_bytes_on_disk": sum(path.stat().st_size for path in files if path not in tables),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(float(sys.argv[2])))))
