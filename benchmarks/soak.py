"""Killed again and again, always resumed: what a pipeline run gives then, against one that was left alone.

Each pipeline is `lazytrain run` on a real small model in a folder of its own. At a drawn moment (during start-up, or
a while after one of the next stages began to compute) a drawn process of its tree gets SIGKILL: the run itself,
Prefect's embedded server, any process of Ray where training has a worker. Then `lazytrain resume` goes on, and is
killed in its turn, until the pipeline has had its share of kills and may finish. Once a run is recorded its
configuration file is edited, which must not matter. Everything drawn comes from `--seed`.

    python -m benchmarks.soak [--quick | --moments] [--kills N] [--seed S] [--data FOLDER]

`--moments` is the chain under the default policy, without Prefect, killed once at every moment of every stage call (see
`tests.faults.mortal_loop`), one after the other.

Figures, over all pipelines: `digests_equal` (every output of every stage as in the undisturbed run), `committed_twice`
(identities with more than one commit), `left_running` (runs in MLflow, flow and task runs in Prefect, and processes).
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.chain import report
from data_contracts.records import Promotion
from data_contracts.store import Store
from flows.workspace import Workspace
from tests.faults.mortal_loop import RACE, killed, live, moments, write
from tests.flows.small_run import lay_out

ROOT = Path(__file__).resolve().parents[1]
KILLS_A_PIPELINE = 6
STAGES, AHEAD = 12, 4
"""Stage calls of the pipeline, and at most how many of them a killed run gets further."""
OVER = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
MOMENTS_FLOPS = 2 * 10**10
START_SECONDS, AFTER_SECONDS, PATIENCE_SECONDS = 12.0, 2.5, 600.0


@dataclass
class Pipeline:
    """One folder with a configuration, and the command run in it."""

    folder: Path
    workers: int
    resumes: int = 0
    victims: Counter[str] = field(default_factory=Counter)

    @property
    def home(self) -> Path:
        """The folder of its store."""
        return self.folder / ".lazytrain"

    @property
    def store(self) -> Store:
        """Its store, read anew."""
        return Store(Workspace.read(self.folder / "lazytrain.yaml").address)

    def lay_out(self, shared: Path) -> None:
        """Write data, model and configuration."""
        self.folder.mkdir(parents=True)
        train = {"learning_rate": 1e-3, "evaluations": 2, "snapshot_steps": 1, "workers": self.workers}
        lay_out(self.folder, shared, train=train)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the run, or go on with the newest one that did not finish."""
        made = self.store.runs() if (self.home / "mlflow.db.ready").exists() else []
        command = ["resume", made[0].run] if made else ["run"]
        self.resumes += bool(made)
        if made:  # a resumed run goes by what it recorded, not by what the file says now
            file = self.folder / "lazytrain.yaml"
            file.write_text(file.read_text().replace("fraction: 0.4", "fraction: 0.2"))
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "flows.command.app", *command],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def begun(self) -> int:
        """Return how many stages are or were computing."""
        return sum(1 for _ in self.home.glob("work/*/claim-*")) + sum(
            1 for _ in self.home.glob("artifacts/*/artifacts/manifest.json")
        )

    def disturb(self, rng: np.random.Generator) -> bool:
        """Run until a drawn moment, kill a drawn process, wait for the end; return whether the pipeline finished."""
        child = self.start()
        begun = self.begun()
        wanted = int(rng.integers(begun, min(begun + AHEAD, STAGES) + 1))
        delay = float(rng.uniform(0, AFTER_SECONDS if wanted > begun else START_SECONDS))
        while child.poll() is None and self.begun() < wanted:
            time.sleep(0.02)
        until = time.monotonic() + delay
        while child.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if child.poll() is None:
            self._kill(child.pid, rng)
        if child.wait(PATIENCE_SECONDS) == 0:
            return True
        if [row.status for row in self.store.runs()[:1]] != ["FINISHED"]:
            return False
        status = [
            sys.executable,
            "-m",
            "flows.command.app",
            "status",
        ]  # killed on its way out: no resume ends its server
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(status, cwd=self.folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        return True

    def _kill(self, pid: int, rng: np.random.Generator) -> None:
        main = psutil.Process(pid)
        below = sorted(main.children(recursive=True), key=lambda process: process.create_time())
        victim = main if not below or rng.random() < 0.5 else below[int(rng.integers(len(below)))]
        words = victim.cmdline() or [victim.name()]
        name = (
            "the run"
            if victim == main
            else next((word for word in words if "server:" in word or "ray" in word), words[0])
        )
        self.victims[name.rpartition("/")[2].partition(":create")[0]] += 1
        victim.kill()

    def finish(self) -> None:
        """Run to the end, undisturbed."""
        code = self.start().wait(PATIENCE_SECONDS)
        if code:
            raise SystemExit(
                f"{self.folder}: an undisturbed run ended with {code}:\n{(self.folder / 'log.txt').read_text()[-6000:]}"
            )

    def digests(self) -> dict[str, str]:
        """Return the digest of each output of the newest run, by stage call and output."""
        store = self.store
        found: dict[str, str] = {}
        for row in store.attempts(store.runs()[0].run):
            for name, ref in row.refs.items():
                if name == "promotion":  # an effect says what it found; what it decided is compared
                    promotion = store.record(ref, Promotion)
                    found[f"{row.name}/{name}"] = f"{promotion.outcome} {promotion.decision_digest}"
                else:
                    found[f"{row.name}/{name}"] = ref.digest
        return found

    def committed_twice(self) -> list[str]:
        """Return the identities that have more than one commit."""
        coordination = self.store._coordination
        shards = {
            run for key, run in coordination.tracking.params(coordination.root()).items() if key.startswith("shard.")
        }
        keys = [key for run in shards for key in coordination.tracking.params(run)]
        return [key for key in keys if ".commit." in key and not key.endswith(".commit.1")]

    def left_running(self) -> list[str]:
        """Return what is not over: runs in MLflow, flow and task runs in Prefect, processes."""
        left = [f"MLflow {item.info.run_name}" for item in self.store._attempts.search("attributes.status = 'RUNNING'")]
        with sqlite3.connect(self.home / "prefect" / "prefect.db") as link:
            for kind in ("flow_run", "task_run"):
                rows = link.execute(f"SELECT name, state_type FROM {kind} WHERE state_type NOT IN {OVER}")
                left += [f"Prefect {kind} {name} {state}" for name, state in rows]
        for process in psutil.process_iter():
            try:
                if process.environ().get("PREFECT_HOME") == str(self.home / "prefect"):  # all that the run started
                    left.append(f"process {process.pid} {' '.join(process.cmdline())[:80]}")
            except psutil.Error:
                continue
        return left


def run(folder: Path, shared: Path, kills: int, seed: int, workers: list[int]) -> dict[str, Any]:
    """Run everything below `folder` and return the figures."""
    rng, began = np.random.default_rng(seed), time.monotonic()
    whole: dict[int, dict[str, str]] = {}
    for count in sorted(set(workers)):
        undisturbed = Pipeline(folder / f"whole-{count}", count)
        undisturbed.lay_out(shared)
        undisturbed.finish()
        whole[count] = undisturbed.digests()
        print(f"undisturbed with {count} worker(s): {len(whole[count])} outputs", flush=True)
    pipelines: list[Pipeline] = []
    unequal, twice, left = list[str](), list[str](), list[str]()
    hit: Counter[str] = Counter()
    while sum(item.victims.total() for item in pipelines) < kills:
        item = Pipeline(folder / f"killed-{len(pipelines)}", workers[len(pipelines) % len(workers)])
        item.lay_out(shared)
        pipelines.append(item)
        done = False
        while not done and item.victims.total() < KILLS_A_PIPELINE:
            if sum(other.victims.total() for other in pipelines) >= kills:
                break
            done = item.disturb(rng)
        if not done:
            item.finish()
        found = item.digests()
        unequal += [
            f"{item.folder.name} {name}" for name in whole[item.workers] if found.get(name) != whole[item.workers][name]
        ]
        twice += item.committed_twice()
        left += item.left_running()
        store = item.store
        hit += Counter(row.stage for past in store.runs() for row in store.attempts(past.run) if row.status == "FAILED")
        print(
            f"{item.folder.name}: {dict(item.victims)}, {item.resumes} resumes; unequal {unequal}, left {left}",
            flush=True,
        )
    return {
        "kills": sum(item.victims.total() for item in pipelines),
        "resumes": sum(item.resumes for item in pipelines),
        "digests_equal": not unequal,
        "committed_twice": len(twice),
        "left_running": len(left),
        "pipelines": len(pipelines),
        "victims": dict(sum((item.victims for item in pipelines), Counter[str]())),
        "stages_hit": dict(hit),
        "seconds": round(time.monotonic() - began),
    }


def every_moment(folder: Path, shared: Path) -> dict[str, Any]:
    """Kill one loop at every moment that an undisturbed one passes, and return the figures."""
    began = time.monotonic()
    whole = live(write(folder / "whole", shared, {"flops": MOMENTS_FLOPS}, RACE))
    assert whole is not None
    wanted = moments(whole)
    found = killed(write(folder / "killed", shared, {"flops": MOMENTS_FLOPS}, RACE), wanted)
    return {
        "kills": len(wanted),
        "calls": len(whole["digests"]),
        "decisions_equal": found["decisions"] == whole["decisions"],
        "digests_equal": found["digests"] == whole["digests"],
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    """Parse the command line, run, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three kills of one pipeline without a worker: 3 minutes")
    parser.add_argument("--moments", action="store_true", help="the loop, at every moment: 90 s of a core")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared", help="the folder that holds data/")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        if given.moments:
            report("soak", every_moment(Path(scratch), given.data))
            return
        kills, workers = (3, [0]) if given.quick else (given.kills, [1, 0])
        report("soak", run(Path(scratch), given.data, kills, given.seed, workers))


if __name__ == "__main__":
    main()
