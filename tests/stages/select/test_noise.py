"""Noise filters: each suspicion against brute force, and none of what they drop chosen or lost."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_contracts.config import SelectConfig
from data_contracts.errors import ConfigError
from data_contracts.method import names, resolve
from data_contracts.records import Summary
from stages.select.methods.top_k import TopK
from stages.select.noise import Evidence, NoiseFilter, compared
from stages.select.selector import Candidates
from stages.select.stage import STAGE, SelectSlice
from stages.stage import Artifact
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.select.test_coreset_selectors import features_table
from tests.stages.select.test_select import scores_table, tokens_table

ROWS, WORDS = 48, 40


def noisy_tokens(folder: Path, seed: int = 0) -> tuple[Artifact, np.ndarray, list[dict[str, Any]]]:
    """Three sources with words of their own, some of each answer from its prompt; a fifth of the answers go round."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(WORDS, size=int(rng.integers(3, 9))).tolist() for _ in range(ROWS)]
    sources = [row % 3 for row in range(ROWS)]
    answers = []
    for prompt, source in zip(prompts, sources, strict=True):
        own = rng.integers(10 * source, 10 * source + 10, size=int(rng.integers(3, 7))).tolist()
        answers.append(own + prompt[:2])
    wrong = rng.choice(ROWS, ROWS // 5, replace=False)
    given = [answers[row] for row in np.roll(wrong, 1).tolist()]
    for row, answer in zip(wrong.tolist(), given, strict=True):
        answers[row] = answer
    rows = [
        {
            "example_id": f"r{row:03d}",
            "source": f"s{sources[row]}",
            "input_ids": prompts[row] + answers[row],
            "answer_mask": [False] * len(prompts[row]) + [True] * len(answers[row]),
            "n_tokens": len(prompts[row]) + len(answers[row]),
            "n_answer_tokens": len(answers[row]),
            "truncated": False,
        }
        for row in range(ROWS)
    ]
    work = LocalWork(folder, {"t": "tokens"})
    with work.writer("t") as writer:
        for row in rows:
            writer.append(row)
    return work.artifact("t"), np.isin(np.arange(ROWS), wrong), rows


def fit_by_hand(rows: list[dict[str, Any]]) -> list[float]:
    """Return the suspicions of the docstring of `answer_fit`, row by row."""
    split = [
        (
            [t for t, m in zip(row["input_ids"], row["answer_mask"], strict=True) if not m],
            [t for t, m in zip(row["input_ids"], row["answer_mask"], strict=True) if m],
        )
        for row in rows
    ]
    known = {token for _, answer in split for token in answer}
    probabilities = []
    for at, (row, (prompt, answer)) in enumerate(zip(rows, split, strict=True)):
        others = [(rows[i]["source"], split[i][1]) for i in range(len(rows)) if i != at]
        pool = Counter(token for _, other in others for token in other)
        source = Counter(token for name, other in others for token in other if name == row["source"])
        total = sum(pool.values()) + len(known)
        probabilities.append(
            [
                (
                    prompt.count(token) / len(prompt),
                    source[token] / sum(source.values()) if source else (pool[token] + 1) / total,
                    (pool[token] + 1) / total,
                )
                for token in answer
            ]
        )
    share = [1 / 3] * 3
    flat = [item for row in probabilities for item in row]
    for _ in range(50):
        belongs = [[s * p for s, p in zip(share, item, strict=True)] for item in flat]
        share = [sum(item[k] / sum(item) for item in belongs) / len(flat) for k in range(3)]
    return [
        -sum(math.log(sum(s * p for s, p in zip(share, item, strict=True)) / item[2]) for item in row)
        for row in probabilities
    ]


@pytest.mark.parametrize("at_once", [7, 4096])
def test_answer_fit_is_the_likelihood_ratio_of_its_formula_whatever_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    from stages.select.noise_filters import answer_fit

    monkeypatch.setattr(answer_fit, "ROWS_AT_ONCE", at_once)
    tokens, wrong, rows = noisy_tokens(tmp_path)
    found = answer_fit.AnswerFit().suspicion(Evidence(tokens.table()))
    np.testing.assert_allclose(found, fit_by_hand(rows), atol=1e-9)
    better = (found[wrong][:, None] > found[~wrong][None, :]).mean()
    assert better > 0.9  # area under the ROC curve


def test_a_source_with_one_row_is_measured_by_prompt_and_pool(tmp_path: Path) -> None:
    tokens = tokens_table(tmp_path, ["a", "b"], [3, 4], ["x", "y"])
    found = resolve(NoiseFilter, {"method": "answer_fit"}, "n").suspicion(Evidence(tokens.table()))
    assert np.isfinite(found).all()


def test_rows_are_compared_with_the_robust_spread_of_their_source() -> None:
    import pyarrow as pa

    rng = np.random.default_rng(0)
    value = np.concatenate([rng.normal(5, 1, 40), rng.normal(90, 10, 40), [np.nan, 7.0, 400.0]])
    source = ["easy"] * 40 + ["hard"] * 41 + ["small", "hard"]
    found = compared(value, pa.chunked_array([pa.array(source)]))
    hard = [row for row, name in enumerate(source) if name == "hard" and np.isfinite(value[row])]
    median = np.median(value[hard])
    spread = 1.4826 * np.median(abs(value[hard] - median))
    np.testing.assert_allclose(found[hard], (value[hard] - median) / spread)
    assert np.isnan(found[80])
    known = value[np.isfinite(value)]
    expected = (7.0 - np.median(known)) / (1.4826 * np.median(abs(known - np.median(known))))
    assert found[81] == pytest.approx(expected)  # too small a source: the pool's


def losses_table(folder: Path, visits: dict[str, list[float]]) -> Artifact:
    work = LocalWork(folder, {"t": "example_losses"})
    rows = [(step, name, loss) for name, losses in visits.items() for step, loss in enumerate(losses)]
    rows.sort(key=lambda row: row[0])
    with work.writer("t") as writer:
        for position, (step, name, loss) in enumerate(rows):
            values = {"step": step, "position": position, "example_id": name, "loss_sum": 2 * loss, "answer_tokens": 2}
            writer.append(values)
    return work.artifact("t")


def evidence_of(folder: Path, **given: Any) -> Evidence:
    return Evidence(tokens_table(folder, list("abcd"), [4, 4, 4, 4]).table(), **given)


def test_trajectories_that_stay_high_or_rise_again_are_suspected_and_unvisited_rows_are_not(tmp_path: Path) -> None:
    from stages.statistics.trajectories import Trajectories

    visits = {"a": [3.0, 1.0, 0.5], "b": [4.0, 4.0, 4.0], "c": [2.0, 1.0, 3.5], "x": [9.0, 9.0]}
    evidence = evidence_of(tmp_path / "t", visits=Trajectories([losses_table(tmp_path / "l", visits).folder]))
    by_mean = resolve(NoiseFilter, {"method": "trajectory", "drop": 0.34}, "n").sift(evidence)
    by_rise = resolve(NoiseFilter, {"method": "trajectory", "by": "rise", "drop": 0.34}, "n").sift(evidence)
    np.testing.assert_allclose(by_mean.suspicion_N, [1.5, 4.0, 6.5 / 3, np.nan])
    np.testing.assert_allclose(by_rise.suspicion_N, [0.0, 0.0, 2.5, np.nan])
    assert (by_mean.dropped_D.tolist(), by_rise.dropped_D.tolist(), by_rise.known) == ([1], [2], 3)


def test_disagreement_is_the_rank_here_minus_the_lowest_rank_elsewhere(tmp_path: Path) -> None:
    others = (np.array([1.0, 2.0, 3.0, np.nan]), np.array([5.0, 1.0, 9.0, np.nan]))
    evidence = evidence_of(tmp_path, score_N=np.array([4.0, 3.0, 2.0, 1.0]), others=others)
    found = resolve(NoiseFilter, {"method": "disagreement"}, "n").suspicion(evidence)
    ranks = np.array([7 / 8, 5 / 8, 3 / 8, 1 / 8])
    lowest = np.array([min(1 / 6, 3 / 6), min(3 / 6, 1 / 6), min(5 / 6, 5 / 6), np.nan])
    np.testing.assert_allclose(found, ranks - lowest)


def test_self_influence_is_the_length_of_the_feature_by_answer_token(tmp_path: Path) -> None:
    from stages.select.features import features_for

    rng = np.random.default_rng(0)
    feature = (rng.normal(size=(3, 64)) * np.array([[1.0], [2.0], [9.0]])).astype(np.float32)
    table = features_table(tmp_path / "f", ["a", "b", "d"], feature)
    tokens = tokens_table(tmp_path / "t", list("abcd"), [4, 2, 4, 3]).table()
    evidence = Evidence(tokens, features=features_for(tokens.column("example_id"), table.table()))
    found = resolve(NoiseFilter, {"method": "self_influence"}, "n").suspicion(evidence)
    np.testing.assert_allclose(found[[0, 1, 3]], np.linalg.norm(feature, axis=1) / [4, 2, 3], rtol=1e-3)
    assert np.isnan(found[2])
    flat = features_table(
        tmp_path / "u", list("abcd"), (feature[[0, 1, 2, 0]] / np.linalg.norm(feature[[0, 1, 2, 0]], axis=1)[:, None])
    )
    evidence = Evidence(tokens, features=features_for(tokens.column("example_id"), flat.table()))
    with pytest.raises(ConfigError, match="keep their length"):
        resolve(NoiseFilter, {"method": "self_influence"}, "n").suspicion(evidence)


@pytest.mark.parametrize("method", ["loss", "trajectory", "self_influence", "disagreement"])
def test_a_filter_without_its_evidence_says_what_to_give(tmp_path: Path, method: str) -> None:
    with pytest.raises(ConfigError, match=f"noise filter {method} is given"):
        resolve(NoiseFilter, {"method": method}, "select.noise").sift(evidence_of(tmp_path))


def test_a_split_that_would_drop_most_rows_drops_none(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = tokens_table(tmp_path, [f"{row:03d}" for row in range(300)], [1] * 300).table()
    method = resolve(NoiseFilter, {"method": "loss"}, "n")
    few = np.concatenate([rng.normal(1, 0.1, 240), rng.normal(5, 0.3, 60)])
    most = np.concatenate([rng.normal(1, 0.1, 60), rng.normal(5, 0.3, 240)])
    assert method.sift(Evidence(tokens, loss_N=few)).dropped_D.tolist() == list(range(240, 300))
    assert not len(method.sift(Evidence(tokens, loss_N=most)).dropped_D)


SCORES: dict[str, float | None] = {name: float(at) for at, name in enumerate("abcdef")}


def run(folder: Path, noise: dict[str, Any] | None, **config: Any) -> tuple[LocalWork, Summary]:
    work = work_for(STAGE, folder / "work")
    given = {
        "pool_tokens": tokens_table(folder / "pool", list("abcdef"), [1] * 6, list("xyxyxy")),
        "scores": scores_table(folder / "scores", SCORES),
        "example_losses": losses_table(folder / "losses", {name: [1.0, 1.0 + (name in "cf")] for name in "abcdef"}),
    }
    return work, STAGE.run(SelectSlice(seed=0, select=SelectConfig(noise=noise, **config)), inputs_of(**given), work)


TRAJECTORY = {"method": "trajectory", "drop": 0.34}


@pytest.mark.parametrize("selector", ["top_k", "random"])
def test_a_dropped_row_is_listed_once_and_never_chosen_and_the_fraction_stays_that_of_the_pool(
    tmp_path: Path, selector: str
) -> None:
    work, summary = run(tmp_path, TRAJECTORY, selector={"method": selector}, fraction=0.5)
    chosen = [row["example_id"] for row in work.rows("selection")]
    assert len(chosen) == 3
    assert not set(chosen) & {"c", "f"}
    if selector == "top_k":
        assert chosen == ["e", "d", "b"]
    assert [(row["example_id"], row["reason"]) for row in work.rows("quarantine")] == [("c", "noise"), ("f", "noise")]
    assert (summary.facts["noise_dropped"], summary.facts["noise_known"]) == (2, 6)
    (table,) = [table for table in summary.tables if table.title == "Dropped as noise"]
    assert table.rows == (("x", 1, 3), ("y", 1, 3))


def test_a_filter_that_drops_nothing_says_so_and_changes_nothing(tmp_path: Path) -> None:
    plain, _ = run(tmp_path / "plain", None, count=3)
    work, summary = run(tmp_path / "none", {"method": "trajectory", "by": "rise", "least_visits": 9}, count=3)
    assert work.rows("selection") == plain.rows("selection")
    assert "dropped no row: it knows nothing of any row" in work.notices[0]
    assert summary.facts["noise_dropped"] == 0


def test_a_budget_larger_than_what_is_left_says_so(tmp_path: Path) -> None:
    work, _ = run(tmp_path, TRAJECTORY, count=6)
    assert len(work.rows("selection")) == 4
    assert work.notices == ["the budget (6 rows) is larger than what the noise filter left: all 4 rows were taken"]


def test_a_pool_of_some_rows_is_seen_as_those_rows_alone(tmp_path: Path) -> None:
    from stages.select.features import features_for
    from stages.select.quota import Quota

    rng = np.random.default_rng(0)
    ids, kept = [f"{row:03d}" for row in range(30)], np.array([2, 3, 11, 29])
    tokens = tokens_table(tmp_path / "t", ids, list(range(1, 31))).table()
    has = [row for row in range(30) if row % 3 != 2]
    feature = rng.normal(size=(len(has), 8)).astype(np.float32)
    features = features_for(
        tokens.column("example_id"), features_table(tmp_path / "f", [ids[r] for r in has], feature).table()
    )
    score = rng.normal(size=30).astype(np.float32)
    lengths = tokens.column("n_tokens").to_numpy()
    similarity = rng.random((30, 30)).astype(np.float32)
    pool = Candidates(
        tokens.column("example_id"),
        tokens.column("source"),
        lengths,
        score,
        features=features,
        similarity_NN=similarity,
    )
    part = pool.only(kept)
    assert part.ids.to_pylist() == ["002", "003", "011", "029"]
    assert part.lengths_N is not None
    assert part.lengths_N.tolist() == [3, 4, 12, 30]
    assert part.features is not None
    assert part.features.rows_F.tolist() == [1]
    np.testing.assert_array_equal(part.features.matrix(np.array([1])), features.matrix(np.array([3])))
    assert part.similarity_NN is not None
    assert part.similarity_NN[1, 2] == similarity[3, 11]
    best = TopK().select(part, Quota(2, None, ""), rng).rows
    assert kept[best].tolist() == sorted(kept.tolist(), key=lambda row: -score[row])[:2]


def test_the_configured_filter_is_part_of_the_stages_version() -> None:
    config = SelectSlice(seed=0, select=SelectConfig(count=1, noise={"method": "loss"}))
    assert (NoiseFilter, "loss") in STAGE.methods(config)
    assert set(names(NoiseFilter)) == {"answer_fit", "disagreement", "loss", "self_influence", "trajectory"}
    with pytest.raises(ConfigError, match=r"select\.noise\.method"):
        STAGE.methods(SelectSlice(seed=0, select=SelectConfig(count=1, noise={})))
