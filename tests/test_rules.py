"""The import rules hold, and would notice a violation: every contract breaks when one is planted against it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

ROOMS = ("flows", "stages", "data_contracts")
PLANTED = {
    "Three rooms, one direction": ("data_contracts/canonical.py", "import stages.stage"),
    "Only flows import prefect": ("stages/judge/stage.py", "import prefect"),
    "Only the store imports mlflow": ("flows/pipeline.py", "import mlflow"),
    "Only stages import torch": ("flows/present.py", "import torch"),
    "Only workers import ray": ("stages/train/stage.py", "import ray"),
    "A verb imports nouns, never a verb": ("stages/score/stage.py", "import stages.select.stage"),
    "A noun imports only nouns below it": ("stages/text/normalise.py", "import stages.model.batch"),
    "Inside data_contracts, one direction": (
        "data_contracts/tables.py",
        "import data_contracts.records",
    ),
}


def verdicts(folder: Path) -> dict[str, str]:
    """Return KEPT or BROKEN for each contract, as the linter says in `folder`."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1"},
        check=False,
    )
    found = dict(re.findall(r"^(.*\S)\s+(KEPT|BROKEN)\s*$", done.stdout, flags=re.MULTILINE))
    assert found, done.stdout + done.stderr
    return found


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", folder)
    return folder


def test_every_import_rule_holds_and_breaks_when_a_violation_is_planted(copy: Path) -> None:
    kept = verdicts(copy)
    assert {name for name, verdict in kept.items() if verdict == "BROKEN"} == set()
    assert set(kept) == set(PLANTED), "a contract without a planted violation"
    for path, statement in PLANTED.values():
        with (copy / path).open("a") as module:
            module.write(f"\n{statement}\n")
    assert {name for name, verdict in verdicts(copy).items() if verdict == "KEPT"} == set()


LIGHT = """
import sys
{statement}
print(sorted(name for name in ("torch", "ray", "transformers", "mlflow") if name in sys.modules))
"""


@pytest.mark.parametrize(
    "module",
    [
        f"stages.{verb}.stage"
        for verb in ("ingest", "plan", "score", "select", "train", "govern", "weigh", "quote", "judge")
    ],
)
def test_a_stage_is_declared_without_loading_torch_or_ray(module: str) -> None:
    code = LIGHT.format(statement=f"import {module}")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
