"""The quick start as a user meets it: seconds, memory, loss before and after, and what a second run costs.

Runs `lazytrain quickstart` in a fresh folder in a process of its own, watches the resident memory of its whole process
tree, runs it again, and then a bare Prefect flow of one task started in the same way on the same database. The model is
fetched before the clock starts. `--quick` takes a quarter of the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chain import report
from flows.command import quickstart, quickstart_data
from flows.command.model import pull

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_SECONDS = 0.2
QUICK = quickstart_data.Sizes(target=12, validation=12, holdout=32, pool_of_target=20, other_topic=2, manual=8)

BARE_FLOW = """
import sys
from pathlib import Path
from flows.environment import prepare
prepare(Path(sys.argv[1]))
from prefect import flow, task

@task
def one() -> int:
    return 1

@flow(name="bare")
def bare() -> int:
    return one()

bare()
"""


def timed(arguments: list[str]) -> tuple[float, int]:
    """Run a command and return (seconds, peak bytes): the largest sum of resident memory over its process tree."""
    started, peak = time.monotonic(), 0
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(arguments, env=env, stdout=log, stderr=subprocess.STDOUT)
        while child.poll() is None:
            peak = max(peak, tree_bytes(child.pid))
            time.sleep(SAMPLE_SECONDS)
        if child.returncode:
            log.seek(0)
            raise RuntimeError(f"{arguments} ended with {child.returncode}:\n{log.read().decode()[-4000:]}")
    return time.monotonic() - started, peak


def tree_bytes(pid: int) -> int:
    """Return the resident bytes of a process and all below it."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        return total
    return total


def compared(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of the gate that compared the candidate with the base."""
    findings = {item["gate"]: item for item in outcome["verdict"]["findings"]}
    return findings["better_than_base"]["numbers"]


def run(folder: Path, quick: bool) -> dict[str, Any]:
    """Run everything and return the figures."""
    pull()
    if quick:
        quickstart.write(folder, QUICK)
    command = [sys.executable, "-m", "flows.command.app", "quickstart", "--folder", str(folder)]
    first, again = folder / "first.json", folder / "again.json"
    seconds, peak = timed([*command, "--outcome", str(first)])
    rerun_seconds, _ = timed([*command, "--outcome", str(again)])
    bare_flow_seconds, _ = timed([sys.executable, "-c", BARE_FLOW, str(folder / ".lazytrain")])
    outcome, second = json.loads(first.read_text()), json.loads(again.read_text())
    numbers = compared(outcome)
    return {
        "seconds": round(seconds, 1),
        "peak_bytes": peak,
        "holdout_loss_before": numbers["before"],
        "holdout_loss_after": numbers["after"],
        "interval": [numbers["low"], numbers["high"]],
        "rerun_seconds": round(rerun_seconds, 1),
        "bare_flow_seconds": round(bare_flow_seconds, 1),
        "verdict": outcome["verdict"]["outcome"],
        "reused": f"{sum(step['cached'] for step in second['steps'])} of {len(second['steps'])}",
        "flops": sum(cost["flops"] for _, _, cost in outcome["ledger"]["charges"]),
        "stage_seconds": {
            step["name"]: round(sum(cost["seconds"] for cost in step["costs"].values()), 1) for step in outcome["steps"]
        },
    }


def main() -> None:
    """Parse the command line, run, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows: under 3 minutes")
    parser.add_argument("--folder", type=Path, default=None, help="keep everything here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report("quickstart", run(given.folder or Path(scratch) / "quickstart", given.quick))


if __name__ == "__main__":
    main()
