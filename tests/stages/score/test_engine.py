"""The engine around a scorer: resuming, isolation of what fails, non-finite scores, what is loaded and what is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from data_contracts.arrow import TABLE_FILE
from data_contracts.canonical import file_sha256
from data_contracts.errors import ConfigError, MethodError
from stages.model.batch import Row
from stages.score.blocks import BlockScorer
from stages.score.scorer import Block, Meter, Scorer
from tests.local_work import LocalWork
from tests.stages.gradients.small_models import VOCABULARY, rows_of
from tests.stages.gradients.test_inner_product import explicit_gradient
from tests.stages.score.setting import make_setting, odd_row

ROOT = Path(__file__).parents[3]


def output_hash(work: LocalWork) -> str:
    return file_sha256(work.home / "outputs" / "scores" / TABLE_FILE)


def test_perplexity_is_the_mean_loss_of_the_answer(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    from stages.model.load import load_model

    model = load_model(setting.pin)
    explicit = [explicit_gradient(model, row) for row in rows_of(24, seed=1)]
    expected = np.array([loss / tokens for _, loss, tokens in explicit])
    top = [row["score"] for row in setting.scores("top", scorer={"method": "perplexity"}).values()]
    low = setting.scores("low", scorer={"method": "perplexity", "order": "low"})
    middle = setting.scores("middle", scorer={"method": "perplexity", "order": "middle"})
    np.testing.assert_allclose(top, expected, rtol=1e-5)
    np.testing.assert_allclose([row["score"] for row in low.values()], -expected, rtol=1e-5)
    best = sorted(middle, key=lambda example_id: -middle[example_id]["score"])[:2]
    ranked = sorted(middle, key=lambda example_id: middle[example_id]["loss"])
    assert sorted(best) == sorted(ranked[11:13])  # the two in the middle of 24


def test_a_forward_only_method_is_charged_a_third_of_a_training_pass_or_less(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    forward, _ = setting.score("p", scorer={"method": "perplexity"})
    both, _ = setting.score("i", scorer={"method": "influence"})
    assert 0 < forward.ledger().total.flops <= both.ledger().total.flops / 3


def test_random_depends_on_id_and_seed_alone(tmp_path: Path) -> None:
    rows = rows_of(30, seed=1)
    whole = make_setting(tmp_path / "1", pool=rows).scores(scorer={"method": "random"})
    half = make_setting(tmp_path / "2", pool=rows[::2]).scores(scorer={"method": "random"})
    assert all(whole[example_id]["score"] == row["score"] for example_id, row in half.items())
    values = np.array([row["score"] for row in whole.values()])
    assert len(set(values)) == 30
    assert ((values >= 0) & (values < 1)).all()


def test_a_scorer_that_reads_nothing_loads_no_torch(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    folders = {name: str(artifact.folder) for name, artifact in setting.inputs.items()}
    code = f"""
import sys
from pathlib import Path
from data_contracts.config import ScoreConfig
from data_contracts.records import Ref
from stages.score.stage import STAGE, ScoreSlice
from stages.stage import Artifact, Inputs
from tests.local_work import work_for
ref = Ref(contract="x/1", run="", path="", digest="")
inputs = Inputs({{name: (Artifact(ref, Path(folder)),) for name, folder in {folders!r}.items()}})
work = work_for(STAGE, Path({str(tmp_path / "light")!r}))
STAGE.run(ScoreSlice(seed=0, score=ScoreConfig(scorer={{"method": "random"}})), inputs, work)
assert len(work.rows("scores")) == 24
assert not {{"torch", "transformers", "peft"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_an_unknown_scorer_or_setting_is_named_with_the_nearest(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    with pytest.raises(MethodError, match="did you mean 'influence'"):
        setting.score("a", scorer={"method": "influense"})
    with pytest.raises(ConfigError, match="did you mean 'order'"):
        setting.score("b", scorer={"method": "perplexity", "ordre": "low"})


def test_one_bad_example_is_quarantined_and_the_rest_of_its_batch_scored(tmp_path: Path) -> None:
    rows = rows_of(12, seed=1)
    past_embedding = odd_row("99-bad", [1, VOCABULARY + 3, 2], [False, True, True])
    unpredicted = odd_row("99-first", [4, 5, 6], [True, False, False])
    setting = make_setting(tmp_path, pool=[*rows, past_embedding, unpredicted])
    work, summary = setting.score(scorer={"method": "influence"})
    clean = make_setting(tmp_path / "clean", pool=rows).scores(scorer={"method": "influence"})
    found = {row["example_id"]: row for row in work.rows("scores")}
    assert found["99-bad"]["score"] is None
    assert found["99-first"]["score"] is None
    assert found["99-first"]["group_scores"] == []
    reasons = {row["example_id"]: (row["reason"], row["detail"]) for row in work.rows("quarantine")}
    assert reasons["99-bad"][0] == "score_failed"
    assert "IndexError" in reasons["99-bad"][1]
    assert reasons["99-first"][0] == "no_answer_token"
    assert set(reasons) == {"99-bad", "99-first"}
    for example_id, row in clean.items():
        assert found[example_id]["score"] == pytest.approx(row["score"], rel=1e-4, abs=1e-5)
    assert summary.facts["scored"] == 12
    assert summary.facts["quarantined"] == 2


class Failing(Scorer):
    """Fails on chosen ids, gives NaN for others."""

    poison: tuple[str, ...] = ()
    calls: list[int]

    def score(self, block: Block, state: object) -> np.ndarray:
        self.calls.append(len(block.example_ids))
        if set(self.poison) & set(block.example_ids):
            raise ValueError("poisoned")
        return np.arange(len(block.example_ids), dtype=np.float64)


def block_of(rows: Sequence[int]) -> Block:
    ones = np.ones(len(rows), dtype=np.int32)
    return Block([f"r{row}" for row in rows], ones, ones, Meter())


def test_bisection_takes_logarithmically_many_calls_for_one_poisoned_row() -> None:
    method = Failing(poison=("r77",), calls=[])
    scorer = BlockScorer(method, None, block_of, lambda block: None, "mean")
    outcomes = scorer.score(range(128))
    assert [index for index, outcome in enumerate(outcomes) if outcome.reason] == [77]
    assert len(method.calls) == 15  # 128, then two halves at each of seven levels


def test_a_score_that_is_not_finite_is_refused_not_written() -> None:
    class Strange(Scorer):
        def score(self, block: Block, state: object) -> np.ndarray:
            return np.array([[1.0, 2.0], [np.nan, 1.0], [np.inf, 1.0], [1e300, 1.0]])

    outcomes = BlockScorer(Strange(), None, block_of, lambda block: None, "mean").score(range(4))
    assert [outcome.reason for outcome in outcomes] == ["", *["score_not_finite"] * 3]


def test_an_answer_of_another_shape_is_the_methods_fault() -> None:
    class Short(Scorer):
        def score(self, block: Block, state: object) -> np.ndarray:
            return np.zeros(1)

    with pytest.raises(MethodError, match=r"shape \(1, 1\)"):
        BlockScorer(Short(), None, block_of, lambda block: None, "mean").score(range(4))


def test_a_pool_of_which_nothing_can_be_scored_is_an_error(tmp_path: Path) -> None:
    rows = [odd_row(f"r{index}", [4, 5, 6], [True, False, False]) for index in range(3)]
    with pytest.raises(MethodError, match="no_answer_token: 3"):
        make_setting(tmp_path, pool=rows).score(scorer={"method": "perplexity"})


def test_a_resumed_stage_scores_only_what_is_missing_and_gives_the_same_bytes(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, pool=rows_of(60, seed=1), checkpoint=True)
    config = {"scorer": {"method": "influence"}, "batch_tokens": 10}
    whole, _ = setting.score("whole", **config)
    files = sorted((whole.folder / "shards" / "full").glob("*.arrow"))
    assert len(files) > 3
    part, _ = setting.score("part", **config)
    for path in sorted((part.folder / "shards" / "full").glob("*.arrow"))[1:]:
        path.unlink()
    kept = next((part.folder / "shards" / "full").glob("*.arrow"))
    inode = kept.stat().st_ino
    (part.folder / "shards" / "full" / "000000000099.unfinished").write_bytes(b"half")
    resumed, summary = setting.score("part", **config)
    assert summary.measured["shards_kept_from_before"] == 1
    assert kept.stat().st_ino == inode
    assert output_hash(resumed) == output_hash(whole)
    costs = [work.ledger().total for work in (resumed, whole)]
    assert costs[0].flops == costs[1].flops
    assert costs[0].tokens == costs[1].tokens


def test_a_damaged_shard_is_scored_again(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    config = {"scorer": {"method": "perplexity"}, "batch_tokens": 10}
    whole, _ = setting.score("whole", **config)
    part, _ = setting.score("part", **config)
    first = sorted((part.folder / "shards" / "full").glob("*.arrow"))[0]
    first.write_bytes(first.read_bytes()[:200])
    again, _ = setting.score("part", **config)
    assert output_hash(again) == output_hash(whole)


@pytest.mark.slow
def test_a_stage_killed_at_a_random_moment_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, pool=rows_of(150, seed=1), checkpoint=True)
    config = {"scorer": {"method": "influence"}, "batch_tokens": 4}
    whole, _ = setting.score("whole", **config)
    folders = {name: str(artifact.folder) for name, artifact in setting.inputs.items()}
    code = f"""
from pathlib import Path
from data_contracts.config import ScoreConfig
from data_contracts.records import Ref
from stages.score.stage import STAGE, ScoreSlice
from stages.stage import Artifact, Inputs
from tests.local_work import work_for
ref = Ref(contract="x/1", run="", path="", digest="")
inputs = Inputs({{name: (Artifact(ref, Path(folder)),) for name, folder in {folders!r}.items()}})
STAGE.run(ScoreSlice(seed=0, score=ScoreConfig(**{config!r})), inputs, work_for(STAGE, Path({str(tmp_path / "killed")!r})))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    place = tmp_path / "killed" / "scratch" / "shards" / "full"
    deadline = time.monotonic() + 120
    while len(list(place.glob("*.arrow"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = len(list(place.glob("*.arrow")))
    assert left >= 5
    assert not (tmp_path / "killed" / "outputs" / "scores" / "manifest.json").exists()
    resumed, summary = setting.score("killed", **config)
    assert summary.measured["shards_kept_from_before"] == left
    assert output_hash(resumed) == output_hash(whole)


def test_the_summary_shows_both_ends_as_text_and_the_correlation_with_length(tmp_path: Path) -> None:
    rows = rows_of(24, seed=1)
    setting = make_setting(tmp_path, pool=rows)
    examples = LocalWork(tmp_path / "examples", {"e": "examples"})
    ids = sorted(row.example_id for row in rows)
    messages = '[{"role": "user", "content": "Ask %s"}, {"role": "assistant", "content": "Tell"}]'
    examples.table(
        "e",
        {
            "example_id": ids,
            "source": ["s"] * 24,
            "file": ["f"] * 24,
            "row": list(range(1, 25)),
            "messages": [messages % example_id for example_id in ids],
            "tools": [""] * 24,
            "text": [""] * 24,
            "extra": ["{}"] * 24,
        },
    )
    setting.inputs["pool"] = examples.artifact("e")
    work, summary = setting.score(scorer={"method": "perplexity"})
    found = sorted(work.rows("scores"), key=lambda row: -row["score"])
    ends = next(table for table in summary.tables if table.title == "Best and worst")
    assert [row[2] for row in ends.rows[:5]] == [row["example_id"] for row in found[:5]]
    assert ends.rows[-1][2] == found[-1]["example_id"]
    assert ends.rows[0][3] == f"user: Ask {found[0]['example_id']} assistant: Tell"
    from scipy.stats import spearmanr

    expected = spearmanr([row["score"] for row in found], [row["n_tokens"] for row in found]).statistic
    assert summary.facts["spearman_score_length"] == pytest.approx(expected, abs=1e-4)


def test_a_pool_of_one_row_is_scored(tmp_path: Path) -> None:
    row: list[Row] = rows_of(1, seed=1)
    work, _ = make_setting(tmp_path, pool=row).score(scorer={"method": "influence"})
    assert work.rows("scores")[0]["score"] is not None
