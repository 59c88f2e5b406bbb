"""A real run that is small: a 260,032-parameter model and a few dozen instructions, in a folder of its own.

`lay_out` writes data and configuration; `Runs` runs the command there as a user would and reads back what it did.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data_contracts.store import AttemptRow, Store
from flows.workspace import Workspace
from tests.command import lazytrain

CATEGORY = "Question Answering"
ROWS_A_TASK = 8


def lay_out(folder: Path, shared: Path, **sections: dict[str, Any]) -> Path:
    """Write splits that share no task, the model's copy and `lazytrain.yaml`; return the configuration's path."""
    tasks: dict[str, list[dict[str, str]]] = defaultdict(list)
    with gzip.open(shared / "data" / "super_ni" / "super_ni_permissive_150.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["category"] == CATEGORY and len(tasks[row["task"]]) < ROWS_A_TASK:
                tasks[row["task"]].append(row)
    names = sorted(tasks)
    parts = {"target": names[:1], "validation": names[1:2], "holdout": names[2:5], "pool": names[5:10]}
    for part, chosen in parts.items():
        rows = [row for name in chosen for row in tasks[name]]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(plain(row)) + "\n" for row in rows), encoding="utf-8")
    shutil.copytree(shared / "data" / "stories260k", folder / "model")
    values: dict[str, Any] = {
        "name": "small",
        "model": {"path": "model"},
        "data": {part: f"{part}.jsonl" for part in parts},
        "budget": {"peak_bytes": "4GB", "flops": 10**12},
        "ingest": {"longest_tokens": 256, "truncation": "prompt_start", "dedupe": "exact"},
        "begin": {"fraction": 0.2},
        "select": {"selector": {"method": "top_k"}, "fraction": 0.4},
        "train": {"learning_rate": 1e-3, "evaluations": 2},
        "govern": {"rounds": 1},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return write(folder, values)


def plain(row: dict[str, Any]) -> dict[str, str]:
    """Return an instruction row as prompt and completion."""
    output = row["output"] if isinstance(row["output"], str) else row["output"][0]
    return {"prompt": f"{row['instruction']}\n{row['input']}", "completion": output}


def write(folder: Path, values: dict[str, Any]) -> Path:
    """Write the configuration."""
    path = folder / "lazytrain.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


@dataclass
class Runs:
    """A folder with a configuration, and the command run in it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def edit(self, section: str, **changes: Any) -> None:
        """Change a section of the configuration."""
        values = yaml.safe_load((self.folder / "lazytrain.yaml").read_text(encoding="utf-8"))
        values[section] = {**values.get(section, {}), **changes}
        write(self.folder, values)

    def run(self, *arguments: str) -> str:
        """Run the command; it must succeed. Returns what it printed."""
        done = lazytrain(*arguments, cwd=self.folder, **self.environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def store(self) -> Store:
        """The store of the folder, read anew."""
        return Store(Workspace.read(self.folder / "lazytrain.yaml").address)

    def newest(self) -> str:
        """Return the id of the newest pipeline run."""
        return self.store.runs()[0].run

    def attempts(self, run: str | None = None) -> list[AttemptRow]:
        """Return what was done in a run, by default the newest."""
        return self.store.attempts(run or self.newest())
