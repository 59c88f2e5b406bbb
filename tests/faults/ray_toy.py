"""A stage that works on two Ray workers, in a process of its own to be killed: python -m tests.faults.ray_toy REQUEST.

Each execution of the workers writes a line to the request's `log` and then waits for the file `go`; so a test sees how
often it was executed, and when to kill.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from stages import __main__ as entry
from stages import runner
from stages.stage import Inputs, Work
from tests.stages import toys

ENTRY = "tests.faults.ray_toy:work_on"


def work_on(job: dict[str, Any], group: Any, channel: Any) -> None:
    """Note that this was executed, wait for the word to go on, and leave the result."""
    if group.rank == 0:
        with Path(job["log"]).open("a", encoding="utf-8") as log:
            log.write("executed\n")
    while not Path(job["go"]).exists():
        time.sleep(0.05)
    channel.report({"loss": 1.0})
    if group.rank == 0:
        (Path(job["folder"]) / "rows").write_text(str(job["rows"]), encoding="utf-8")


class OnRay(toys.Make):
    def run(self, config: toys.MakeSlice, inputs: Inputs, work: Work) -> Any:
        """Let two workers do it."""
        from stages.workers.train import run_workers

        job = {name: str(work.knobs[name]) for name in ("log", "go")}
        run_workers(
            ENTRY,
            {**job, "rows": config.rows, "folder": str(work.folder)},
            workers=2,
            device="cpu",
            folder=work.folder,
            progress=lambda done, total: None,
        )
        rows = int((work.folder / "rows").read_text(encoding="utf-8"))
        work.table("selection", toys.selection(rows, config.start))
        return toys.Summary(title="on ray")


if __name__ == "__main__":
    runner.find_stage = lambda verb: OnRay()
    sys.exit(entry.main(["select", sys.argv[1]]))
