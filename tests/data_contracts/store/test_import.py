"""The store is imported by everything that shows help; MLflow is not, until a store is opened."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT


def test_importing_the_store_and_the_runner_imports_neither_mlflow_nor_torch() -> None:
    script = "import sys, stages.runner; print(sorted({'mlflow', 'torch', 'ray', 'prefect'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
