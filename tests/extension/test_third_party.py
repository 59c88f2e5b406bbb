"""A method from somebody else's package: built, installed from its own project, found by name, used, and versioned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stages.score.setting import Setting, make_setting

ROOT = Path(__file__).resolve().parents[2]

SCORER = '''
"""Favours long rows."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stages.score.scorer import Block, Scorer


class Lengthy(Scorer):
    """Score is the number of tokens times a factor."""

    factor: float = Field(1.0, gt=0)

    def score(self, block: Block, state: object) -> np.ndarray:
        return block.lengths_B * self.factor
'''

SELECTOR = '''
"""Takes the last rows of the pool."""

from __future__ import annotations

import numpy as np

from stages.select.selector import Choice, Selector


class Last(Selector):
    def select(self, pool, quota, rng):
        return Choice(quota.fill(np.arange(len(pool))[::-1], pool.lengths_N), reason="from the end")
'''

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "somebodys-methods"
version = "{version}"

[project.entry-points."lazytrain.scorers"]
lengthy = "somebodys_methods.lengthy:Lengthy"

[project.entry-points."lazytrain.selectors"]
last = "somebodys_methods.last:Last"

[tool.setuptools]
packages = ["somebodys_methods"]
"""


def install(folder: Path, *, version: str = "1.0", scorer: str = SCORER) -> Path:
    """Write the project, build its wheel offline and install it into a folder of its own; return that folder."""
    package = folder / "project" / "somebodys_methods"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "lengthy.py").write_text(scorer)
    (package / "last.py").write_text(SELECTOR)
    (folder / "project" / "pyproject.toml").write_text(PROJECT.format(version=version))
    site = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--target", str(site), str(folder / "project")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        command = ["uv", "pip", "install", "--quiet", "--python", sys.executable, "--no-index", "--no-deps"]
        command += ["--no-build-isolation", "--target", str(site), str(folder / "project")]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


USE = """
import json, sys
from pathlib import Path
from data_contracts.config import ScoreConfig, SelectConfig
from data_contracts.method import names
from data_contracts.records import Ref
from stages.identity import stage_version
from stages.score.scorer import Scorer
from stages.score.stage import STAGE as SCORE, ScoreSlice
from stages.select.selector import Selector
from stages.select.stage import STAGE as SELECT, SelectSlice
from stages.stage import Artifact, Inputs
from tests.local_work import inputs_of, work_for

given = json.loads(sys.argv[1])
ref = Ref(contract="x/1", run="", path="", digest="")
artifacts = {name: Artifact(ref, Path(folder)) for name, folder in given["inputs"].items()}
said = {"scorers": names(Scorer), "selectors": names(Selector)}
assert "somebodys_methods.lengthy" not in sys.modules, "listing imports nothing"
score = ScoreSlice(seed=0, score=ScoreConfig(scorer={"method": "lengthy", "factor": 2.0}))
select = SelectSlice(seed=0, select=SelectConfig(selector={"method": "last"}, count=2))
said["versions"] = [stage_version(SCORE, score).digest, stage_version(SELECT, select).digest]
work = work_for(SCORE, Path(given["work"]) / "score")
SCORE.run(score, inputs_of(**artifacts), work)
said["scores"] = [[row["example_id"], row["score"], row["n_tokens"]] for row in work.rows("scores")]
chosen = work_for(SELECT, Path(given["work"]) / "select")
SELECT.run(select, inputs_of(pool_tokens=artifacts["pool_tokens"], scores=work.artifact("scores")), chosen)
said["selection"] = [row["example_id"] for row in chosen.rows("selection")]
print(json.dumps(said))
"""


def use(site: Path, setting: Setting, work: Path) -> dict[str, Any]:
    given = {"inputs": {name: str(item.folder) for name, item in setting.inputs.items()}, "work": str(work)}
    done = subprocess.run(
        [sys.executable, "-c", USE, json.dumps(given)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return make_setting(tmp_path_factory.mktemp("setting"))


def test_an_installed_method_is_listed_found_and_used_by_its_stage(tmp_path: Path, setting: Setting) -> None:
    said = use(install(tmp_path / "package"), setting, tmp_path / "work")
    assert {"influence", "lengthy", "perplexity", "random"} <= set(said["scorers"])
    assert {"last", "random", "top_k"} <= set(said["selectors"])
    assert all(score == 2.0 * length for _, score, length in said["scores"])
    ids = [example_id for example_id, _, _ in said["scores"]]
    assert said["selection"] == [ids[-1], ids[-2]]


@pytest.mark.slow
def test_an_installed_methods_version_and_source_enter_the_stages_version(tmp_path: Path, setting: Setting) -> None:
    first = use(install(tmp_path / "a"), setting, tmp_path / "wa")["versions"]
    same = use(install(tmp_path / "b"), setting, tmp_path / "wb")["versions"]
    newer = use(install(tmp_path / "c", version="1.1"), setting, tmp_path / "wc")["versions"]
    edited = SCORER.replace("* self.factor", "* self.factor + 1.0 - 1.0")
    changed = use(install(tmp_path / "d", scorer=edited), setting, tmp_path / "wd")["versions"]
    assert first == same
    assert first[0] != newer[0]
    assert first[1] != newer[1]
    assert first[0] != changed[0]
    assert first[1] == changed[1]  # the selector's own module is as it was
