"""Scoring by more than one worker: the same bytes and costs, whoever dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_contracts.arrow import read_table
from data_contracts.config import ScoreConfig
from data_contracts.method import resolve
from stages.identity import identity_of, stage_version
from stages.score import engine
from stages.score.scorer import Scorer
from stages.score.stage import STAGE, ScoreSlice
from tests.conftest import ROOT
from tests.local_work import inputs_of
from tests.stages.gradients.small_models import VOCABULARY, rows_of
from tests.stages.score.mortal import Mortal
from tests.stages.score.setting import Setting, make_setting, odd_row
from tests.stages.score.test_engine import output_hash

CONFIG = {"scorer": {"method": "influence"}, "batch_tokens": 10}


def setting_of(folder: Path) -> Setting:
    poisoned = odd_row("r03-bad", [1, VOCABULARY + 3, 2], [False, True, True])
    return make_setting(folder, pool=[*rows_of(60, seed=1), poisoned], checkpoint=True)


def with_deaths(monkeypatch: pytest.MonkeyPatch, place: Path, **settings: Any) -> None:
    """Let the engine score by `Mortal`."""
    place.mkdir()
    mortal = Mortal(place=str(place), **settings)
    monkeypatch.setattr(engine, "resolve", lambda kind, *rest: mortal if kind is Scorer else resolve(kind, *rest))


def workers_of(process: int) -> list[psutil.Process]:
    """Return the workers below a process."""
    found = psutil.Process(process).children(recursive=True)
    return [child for child in found if "ray::_Worker" in " ".join(child.cmdline())]


def nobody_works() -> bool:
    _, alive = psutil.wait_procs(workers_of(os.getpid()), timeout=30)
    return not alive


def shards(folder: Path) -> list[Path]:
    return list((folder / "scratch" / "shards" / "full").glob("*.arrow"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_of_which_one_is_killed_in_a_shard_give_the_bytes_and_the_costs_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = setting_of(tmp_path)
    whole, one = setting.score("whole", **CONFIG)
    victim = whole.rows("scores")[20]["example_id"]
    with_deaths(monkeypatch, tmp_path / "deaths", victim=victim, deaths=1)
    work, two = setting.score("two", workers=2, **CONFIG)
    assert [path.name for path in (tmp_path / "deaths").iterdir()] == ["died-0"]
    assert output_hash(work) == output_hash(whole)
    assert work.quarantined == whole.quarantined
    assert [row["example_id"] for row in work.quarantined] == ["r03-bad"]
    assert two.facts == one.facts
    assert two.tables == one.tables
    assert work.bars[0][1].done == work.bars[0][1].total == whole.bars[0][1].done
    rows = sum(int(read_table(path).schema.metadata[b"flops"]) for path in shards(whole.home))
    once, each = (cost.ledger().total.flops - rows for cost in (whole, work))
    assert once > 0
    assert each in (2 * once, 3 * once)  # two prepared, and one in the place of the killed, if there was still work
    assert nobody_works()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_driver_leaves_no_worker_and_the_next_attempt_finds_its_shards(tmp_path: Path) -> None:
    setting = setting_of(tmp_path)
    folders = json.dumps({name: str(artifact.folder) for name, artifact in setting.inputs.items()})
    command = [sys.executable, "-m", "tests.stages.score.killed", str(tmp_path / "part"), folders]
    driver = subprocess.Popen(command, cwd=ROOT)
    until = time.monotonic() + 120
    while not shards(tmp_path / "part"):
        assert driver.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    workers = workers_of(driver.pid)
    assert len(workers) == 2
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    kept = len(shards(tmp_path / "part"))
    whole, _ = setting.score("whole", **CONFIG)
    assert 0 < kept < len(shards(whole.home))
    again, summary = setting.score("part", **CONFIG)
    assert summary.measured["shards_kept_from_before"] == kept
    assert output_hash(again) == output_hash(whole)


def test_the_number_of_workers_enters_neither_identity_nor_kin(tmp_path: Path) -> None:
    inputs = inputs_of(**make_setting(tmp_path).inputs)

    def both(**score: Any) -> tuple[str, Any]:
        config = ScoreSlice(seed=0, score=ScoreConfig(**score))
        external = STAGE.external(config, tmp_path)
        return identity_of("score", stage_version(STAGE, config).digest, external, {}), STAGE.kin(config, inputs)

    assert both(workers=1) == both(workers=2)
    assert both(workers=1)[0] != both(batch_tokens=10)[0]
