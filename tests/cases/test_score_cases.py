"""Inputs that broke other scoring tools, by the id of their case: the real ingest, then the real score stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_contracts.config import IngestConfig, ModelConfig, ScoreConfig
from data_contracts.errors import InputError
from stages.ingest.plain import GIVES, ingest_files
from stages.model.load import pin_model
from stages.score.stage import STAGE, ScoreSlice
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.score.setting import record_of

pytestmark = pytest.mark.shared


class Case:
    """One case's folder: `ingest` a file of it, `score` a pool against a target."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work
        self.model = ModelConfig(path=str(folder / "model"))

    def _new(self, name: str) -> Path:
        return self.work / f"{len(list(self.work.iterdir())):03d}-{name}"

    def ingest(self, file: Path, **settings: Any) -> LocalWork:
        work = LocalWork(self._new("ingest"), GIVES)
        ingest_files([str(file)], model=self.model, settings=IngestConfig(**settings), work=work, root=self.folder)
        return work

    def score(self, pool: LocalWork, target: LocalWork, **config: Any) -> dict[str, dict[str, Any]]:
        """Return the rows of `scores` by the id that the pool's file gives."""
        names = {row["example_id"]: json.loads(row["extra"])["id"] for row in pool.rows("pool")}
        work = work_for(STAGE, self._new("score"))
        inputs = inputs_of(
            base=record_of(self._new("base"), "base", pin_model(self.model, self.folder)),
            pool_tokens=pool.artifact("pool_tokens"),
            target_tokens=target.artifact("pool_tokens"),
            pool=pool.artifact("pool"),
        )
        STAGE.run(ScoreSlice(seed=0, score=ScoreConfig(**config)), inputs, work)
        return {names[row["example_id"]]: row for row in work.rows("scores")}


@pytest.fixture
def case(shared: Path, tmp_path: Path):
    def find(name: str) -> Case:
        return Case(next((shared / "cases" / "files").glob(f"{name}-*")), tmp_path)

    return find


def test_S01_answer_truncated_away(case) -> None:
    s01 = case("S01")
    limit = {"longest_tokens": 32}
    pool, fewer = (s01.ingest(s01.folder / name, **limit) for name in ("pool.jsonl", "pool_without_x2.jsonl"))
    refused = pool.rows("quarantine")
    assert [(row["row"], row["reason"]) for row in refused] == [(2, "truncated")]
    assert "prompt is 65 tokens, limit 32" in refused[0]["detail"]
    target = s01.ingest(s01.folder / "target.jsonl", **limit)
    found = s01.score(pool, target, scorer={"method": "influence"})
    alone = s01.score(fewer, target, scorer={"method": "influence"})
    assert sorted(found) == sorted(alone) == ["x1", "x3"]
    for name in ("x1", "x3"):
        assert found[name]["n_answer_tokens"] == 3
        assert found[name]["score"] == pytest.approx(alone[name]["score"], abs=1e-6)
    with pytest.raises(InputError, match="no usable row: 0 of 1"):
        s01.ingest(s01.folder / "target_truncated.jsonl", **limit)


@pytest.mark.parametrize("method", ["influence", "perplexity", "el2n", "grand"])
def test_S02_score_depends_on_batch(case, tmp_path: Path, method: str) -> None:
    s02 = case("S02")
    lines = (s02.folder / "pool.jsonl").read_text(encoding="utf-8").splitlines()
    turned = tmp_path / "reversed.jsonl"
    turned.write_text("\n".join(reversed(lines)) + "\n", encoding="utf-8")
    target = s02.ingest(s02.folder / "target.jsonl")
    settings = {"scorer": {"method": method}}
    runs = [
        s02.score(s02.ingest(file), target, batch_tokens=batch_tokens, **settings)
        for file in (s02.folder / "pool.jsonl", turned)
        for batch_tokens in (1, 4096)
    ]
    for run in runs:
        assert run["b1"]["loss"] == pytest.approx(6.294596, abs=1e-5)
        assert run["b2"]["loss"] == pytest.approx(5.049522, abs=1e-5)
        for name in ("b1", "b2"):
            assert run[name]["score"] == pytest.approx(runs[0][name]["score"], abs=1e-5)
