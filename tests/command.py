"""The `lazytrain` command as tests start it: in a process of its own, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "ray", "prefect", "mlflow", "transformers")


def loaded_by(code: str, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """Return which of `heavy` a fresh Python has loaded after running `code`."""
    script = f"{code}\nimport sys, json\nprint(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def lazytrain(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in `cwd`."""
    return subprocess.run(
        [sys.executable, "-m", "flows.command.app", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", **env},
        capture_output=True,
        text=True,
        check=False,
    )
