"""What the pipeline costs beyond its stages: fixed seconds, and seconds a second of work.

The pipeline runs on growing pools as a user would start it (`lazytrain run`, a new process, a new store); then every
attempt's stage function runs again bare, on the same configuration and inputs, in one process with libraries loaded.
A line through (bare seconds, pipeline seconds) gives `fixed_seconds` (its intercept) and `slope`.

    python -m benchmarks.overhead [--quick] [--data FOLDER]
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

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.cells import draw_categories, read_tasks, settings, write_splits
from benchmarks.chain import report
from data_contracts.records import Manifest
from data_contracts.store import Store
from flows.workspace import Workspace
from stages.stage import Artifact, Inputs, find_stage
from tests.local_work import LocalWork

ROOT = Path(__file__).resolve().parents[1]


def pipeline_seconds(config: Path) -> float:
    """Run `lazytrain run` in a new process and return its wall seconds."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "flows.command.app", "run", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the pipeline failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return time.perf_counter() - began


def bare_seconds(config: Path, scratch: Path) -> dict[str, float]:
    """Run each attempt's stage function again and return seconds by attempt."""
    import peft  # noqa: F401 - loaded before the clock starts
    import torch  # noqa: F401
    import transformers  # noqa: F401

    workspace = Workspace.read(config)
    store = Store(workspace.address)
    seconds: dict[str, float] = {}
    for row in store.attempts(store.runs()[0].run):
        manifest = store.read_manifest(row.run)
        stage = find_stage(manifest.stage)
        if not stage.effect:
            seconds[row.name] = _bare(store, manifest, workspace.root, scratch / row.run)
    return seconds


def _bare(store: Store, manifest: Manifest, root: Path, folder: Path) -> float:
    stage = find_stage(manifest.stage)
    config = stage.config.model_validate(manifest.config)
    inputs = Inputs({name: [Artifact(ref, store.open(ref)) for ref in refs] for name, refs in manifest.inputs.items()})
    every = [ref for refs in manifest.inputs.values() for ref in refs]
    work = LocalWork(folder, stage.gives, seed=manifest.config.get("seed", 0), root=root, ledger=store.ledger(every))
    began = time.perf_counter()
    stage.run(config, inputs, work)
    return time.perf_counter() - began


def write_config(folder: Path, data: Path, rows: int) -> Path:
    """Write a cell of real instructions with `rows` pool rows a task and return its configuration file."""
    tasks = read_tasks(data)
    sizes = {"pool": rows, "target": 10, "validation": 10, "holdout": 10}
    write_splits(folder, tasks, draw_categories(tasks, 1)[0], 0, sizes)
    values: dict[str, Any] = settings(data / "stories260k", 0)
    values |= {"name": "overhead", "govern": {"rounds": 1}, "select": {"fraction": 0.3}}
    path = folder / "lazytrain.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def run(data: Path, sizes: list[int]) -> dict[str, Any]:
    """Return the figures over pools of `sizes` rows a task."""
    table = Table("rows a task", "pipeline, s", "bare stages, s", "largest stages")
    whole, bare = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for rows in sizes:
            config = write_config(Path(scratch) / f"rows-{rows}", data, rows)
            whole.append(pipeline_seconds(config))
            parts = json.loads(
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.overhead", "--bare", str(config)],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout.splitlines()[-1]
            )
            bare.append(sum(parts.values()))
            largest = sorted(parts, key=lambda name: -parts[name])[:3]
            said = ", ".join(f"{name} {parts[name]:.1f}" for name in largest)
            table.add_row(str(rows), f"{whole[-1]:.1f}", f"{bare[-1]:.1f}", said)
    slope, fixed = np.polyfit(bare, whole, 1)
    Console(width=140).print(table)
    return {
        "fixed_seconds": round(float(fixed), 2),
        "slope": round(float(slope), 4),
        "pipeline_seconds": [round(x, 2) for x in whole],
        "bare_seconds": [round(x, 2) for x in bare],
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Parse the command line, run, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small pools: under 3 minutes")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--bare", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(bare_seconds(given.bare, Path(scratch))))
        return
    report("overhead", run(given.data, [1, 4] if given.quick else [1, 4, 8, 16]))


if __name__ == "__main__":
    main()
