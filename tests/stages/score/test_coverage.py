"""Coverages: which rows are computed, what the others are given, and that a kill changes no byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import rankdata, spearmanr

from data_contracts.arrow import TABLE_FILE
from data_contracts.canonical import file_sha256
from data_contracts.config import ScoreConfig
from data_contracts.errors import ConfigError, MethodError
from data_contracts.method import names
from stages.admission import parse_slice
from stages.score.cover import Coverage
from stages.score.coverage.cascade import below
from stages.score.glance import WHOLE, Glance, first_answers, widest
from stages.score.methods.influence import Influence
from stages.score.passes import ScorePass
from stages.score.previous import brought
from stages.score.scorer import Scorer
from stages.score.stage import STAGE, ScoreSlice
from stages.stage import Artifact
from tests.local_work import LocalWork
from tests.stages.gradients.small_models import VOCABULARY, rows_of
from tests.stages.score.setting import Setting, make_setting, moved_checkpoint, odd_row

INFLUENCE = {"scorer": {"method": "influence"}, "batch_tokens": 60}
PREDICT = {"method": "proxy_verify", "tokens": 0.95, "glance": 0.45, "sample": 0.3, "verify": 0.15, "least": -1}


def column(work: LocalWork, name: str) -> np.ndarray:
    return np.array([row[name] for row in work.rows("scores")], dtype=np.float64)


def written(work: LocalWork) -> str:
    return file_sha256(work.home / "outputs" / "scores" / TABLE_FILE)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return make_setting(tmp_path_factory.mktemp("pool"), pool=rows_of(90, seed=1), checkpoint=True)


@pytest.fixture(scope="module")
def whole(setting: Setting) -> LocalWork:
    return setting.score("whole", **INFLUENCE)[0]


@pytest.fixture(scope="module")
def drifted(setting: Setting, whole: LocalWork) -> Setting:
    """The same pool with a moved checkpoint, and the scores of before."""
    checkpoint = moved_checkpoint(setting.folder / "moved", setting.pin)
    inputs = {**setting.inputs, "checkpoint": checkpoint, "previous_scores": [whole.artifact("scores")]}
    return Setting(setting.folder / "drifted", setting.pin, inputs)


@pytest.fixture(scope="module")
def fresh(drifted: Setting) -> np.ndarray:
    return column(drifted.score("fresh", **INFLUENCE)[0], "score")


def test_the_family_holds_the_five_and_full_is_the_default(setting: Setting, whole: LocalWork) -> None:
    assert names(Coverage) == ["cascade", "full", "momentum", "proxy_verify", "speculative"]
    named, summary = setting.score("named", coverage={"method": "full"}, **INFLUENCE)
    assert written(named) == written(whole)
    assert summary.facts["coverage"] == "full"
    assert summary.facts["exact"] == 90


# cascade


def test_a_cascade_computes_the_best_part_and_puts_the_rest_below_in_the_filters_order(
    setting: Setting, whole: LocalWork
) -> None:
    filters = [{"method": "length", "of": "example", "keep": 0.5}, {"method": "length", "of": "answer", "keep": 0.4}]
    work, summary = setting.score("cascade", coverage={"method": "cascade", "filters": filters}, **INFLUENCE)
    score, exact = column(work, "score"), column(work, "exact").astype(bool)
    lengths, answers, ids = column(work, "n_tokens"), column(work, "n_answer_tokens"), np.arange(90)
    first = np.lexsort((ids, -lengths))
    second = first[:45][np.lexsort((first[:45], -answers[first[:45]]))]
    assert set(np.flatnonzero(exact)) == set(second[:18])
    np.testing.assert_allclose(score[exact], column(whole, "score")[exact], rtol=1e-4, atol=1e-5)
    outside = np.lexsort((ids, -score))[18:]
    assert outside.tolist() == [*second[18:], *first[45:]]
    assert score[exact].min() > score[~exact].max()
    assert len(set(score)) == 90
    assert summary.facts["outside_the_cascade"] == 72
    assert work.rows("quarantine") == []
    assert all((row["group_scores"] == []) != row["exact"] for row in work.rows("scores"))
    assert work.ledger().total.flops < 0.5 * whole.ledger().total.flops


def test_rows_that_fail_in_a_cascade_are_quarantined_and_not_ranked_below(tmp_path: Path) -> None:
    rows = [*rows_of(20, seed=1), odd_row("99-bad", [1, VOCABULARY + 3, 2], [False, True, True])]
    setting = make_setting(tmp_path, pool=rows, checkpoint=True)
    coverage = {"method": "cascade", "filters": [{"method": "length", "order": "shortest", "keep": 1}]}
    work, _ = setting.score(coverage=coverage, **INFLUENCE)
    assert [row["example_id"] for row in work.rows("scores") if row["score"] is None] == ["99-bad"]
    assert [row["reason"] for row in work.rows("quarantine")] == ["score_failed"]
    model_filter = {"method": "cascade", "filters": [{"method": "perplexity", "keep": 0.5}]}
    work, _ = setting.score("model", coverage=model_filter, **INFLUENCE)
    assert [(row["example_id"], row["reason"]) for row in work.rows("quarantine")] == [("99-bad", "score_failed")]


def test_numbers_below_fall_and_stay_below_whatever_the_scores() -> None:
    for scores in ([1.0, 2.0], [-3e8, 1e-9], [5.0], [np.nan, 0.0], [-1e30, 1e30], [-3.4e38, 3.4e38], [1e-45, 0.0]):
        found = below(np.array(scores, dtype=np.float32), 500)
        assert found.dtype == np.float32
        assert np.isfinite(found).all()
        assert (np.diff(found.astype(np.float64)) < 0).all()
        assert found[0] < np.nanmin(np.array(scores, dtype=np.float32))


def test_more_rows_than_float32_has_steps_for_keep_their_order_all_the_same() -> None:
    """16 million numbers lie between 1 and 2 in float32: below [16777216, 16777217] a million steps of 1/1e6 do not."""
    scores = np.array([2.0**24, 2.0**24 + 2], dtype=np.float32)
    found = below(scores, 1_000_000)
    step = (2.0**24) * 1e-3 / 1_000_000
    assert step < np.spacing(np.float32(2.0**23))  # rounding the steps alone would make ties
    assert len(np.unique(found)) == 1_000_000
    assert (np.diff(found) < 0).all()
    end = np.finfo(np.float32).min
    edge = np.nextafter(np.nextafter(end, np.float32(0)), np.float32(0))
    last = below(np.array([edge], dtype=np.float32), 4)
    assert last.tolist() == [np.nextafter(edge, end), end, end, end]


@pytest.mark.parametrize("keep", [None, 0, 1.5, True, "half"])
def test_a_share_that_is_none_is_refused(setting: Setting, keep: Any) -> None:
    with pytest.raises(ConfigError, match="keep"):
        setting.score("bad", coverage={"method": "cascade", "filters": [{"method": "length", "keep": keep}]})


@pytest.mark.parametrize(
    ("scorer", "coverage", "said"),
    [
        ({"method": "influnce"}, {"method": "full"}, "did you mean 'influence'"),
        ({"method": "influence", "fork": "auto"}, {"method": "full"}, "did you mean 'form'"),
        ({"method": "influence"}, {"method": "cascade", "filters": [{"method": "bm52", "keep": 0.4}]}, "'bm25'"),
        ({"method": "influence"}, {"method": "cascade", "filters": [{"method": "bm25"}]}, "filters.0.keep"),
        ({"method": "influence"}, {"method": "cascade", "filter": []}, "did you mean 'filters'"),
        ({"method": "influence"}, {"method": "speculative", "proxy": {"method": "el2m"}}, "did you mean 'el2n'"),
        ({"method": "influence"}, {"method": "speculative", "proxy": {"method": "length", "off": "x"}}, "mean 'of'"),
        ({"method": "influence"}, {"method": "proxy_verify", "smaple": 0.1}, "did you mean 'sample'"),
        ({"method": "bm25"}, {"method": "proxy_verify"}, "bm25 reads none"),
        ({"method": "trak"}, {"method": "speculative"}, "trak scores a row by the features of all"),
        ({"method": "influence"}, {"method": "momentum", "decay": 7}, "less than"),
    ],
)
def test_what_scoring_would_refuse_is_refused_when_the_configuration_is_read(
    scorer: dict[str, Any], coverage: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, MethodError)) as refused:
        parse_slice(STAGE, {"seed": 0, "score": {"scorer": scorer, "coverage": coverage}})
    assert said in str(refused.value)


def test_the_scorers_that_a_coverage_names_enter_the_stages_version() -> None:
    from data_contracts.config import ScoreConfig
    from stages.score.stage import STAGE, ScoreSlice

    filters = [{"method": "bm25", "keep": 0.4}, {"method": "el2n", "keep": 0.5}]
    config = ScoreSlice(seed=0, score=ScoreConfig(coverage={"method": "cascade", "filters": filters}))
    assert {name for _, name in STAGE.methods(config)} == {"influence", "cascade", "bm25", "el2n"}


@pytest.mark.parametrize(("coverage", "scorer"), [("cascade", "bm25"), ("speculative", "el2n")])
def test_a_scorer_that_a_coverage_names_by_default_enters_the_stages_version_too(coverage: str, scorer: str) -> None:
    config = ScoreSlice(seed=0, score=ScoreConfig(coverage={"method": coverage}))
    assert (Scorer, scorer) in list(STAGE.methods(config))


def test_a_late_pass_whose_few_rows_all_fail_quarantines_them(
    drifted: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method has scored rows before: it is not broken, these rows are."""
    score, seen = Influence.score, set()

    def fails(self: Influence, block: Any, state: Any) -> np.ndarray:
        if verifying and seen:
            raise RuntimeError("poisoned")
        seen.update(block.example_ids)
        return score(self, block, state)

    verifying: list[bool] = []
    made = ScorePass.complete

    def complete(self: ScorePass, *given: Any, **named: Any) -> ScorePass:
        verifying[:] = [True] if "verify" in str(self._folder.place) else []
        return made(self, *given, **named)

    monkeypatch.setattr(Influence, "score", fails)
    monkeypatch.setattr(ScorePass, "complete", complete)
    work, _ = drifted.score("late", **{**INFLUENCE, "coverage": PREDICT})
    reasons = {row["reason"] for row in work.rows("quarantine")}
    assert reasons == {"score_failed"}
    assert len(work.rows("scores")) == 90


# momentum


@pytest.mark.parametrize("normalise", ["rank", "scale"])
def test_momentum_averages_normalised_scores_with_falling_weights(
    drifted: Setting, whole: LocalWork, fresh: np.ndarray, normalise: str
) -> None:
    rounds = [whole.artifact("scores"), _altered(drifted.folder / normalise, whole)]
    drifted = Setting(drifted.folder, drifted.pin, {**drifted.inputs, "previous_scores": rounds})
    coverage = {"method": "momentum", "decay": 0.6, "normalise": normalise}
    work, summary = drifted.score(f"momentum-{normalise}", coverage=coverage, **INFLUENCE)

    def normal(score: np.ndarray) -> np.ndarray:
        known = score[np.isfinite(score)]
        found = np.full(len(score), np.nan)
        ranks = (rankdata(known) - 0.5) / len(known)
        found[np.isfinite(score)] = ranks if normalise == "rank" else (known - known.mean()) / known.std()
        return found

    older, newer = column(whole, "score"), _altered_scores(whole)
    parts, weights = np.stack([normal(fresh), normal(newer), normal(older)]), np.array([[1.0], [0.6], [0.36]])
    there = np.isfinite(parts)
    expected = (np.where(there, parts, 0) * weights).sum(axis=0) / (there * weights).sum(axis=0)
    np.testing.assert_allclose(column(work, "score"), expected, rtol=1e-5, atol=1e-6)
    assert summary.facts["earlier_rounds_averaged"] == 2
    assert column(work, "exact").all()


def _altered_scores(whole: LocalWork) -> np.ndarray:
    score = np.sin(np.arange(90) * 1.7)
    score[5] = np.nan
    score[70:] = np.nan  # rows that were not in the pool then
    return np.float32(score).astype(np.float64)


def _altered(folder: Path, whole: LocalWork) -> Artifact:
    """A round that had 70 of the rows, scored one of them not at all, and made other scores of its columns."""
    work = LocalWork(folder, {"s": "scores"})
    with work.writer("s") as writer:
        for row, score in zip(whole.rows("scores")[:70], _altered_scores(whole), strict=False):
            none = not np.isfinite(score)
            changed = {"score": None, "group_scores": []} if none else {"score": 0.5, "group_scores": [float(score)]}
            writer.append({**row, **changed, "exact": not none})
    return work.artifact("s")


def test_earlier_scores_are_brought_to_the_rows_by_id() -> None:
    ids = pa.chunked_array([[f"{i:05d}" for i in range(0, 10000, 2)]])
    theirs = [i for i in range(9999) if i % 3 == 0]
    table = pa.table(
        {
            "example_id": [f"{i:05d}" for i in theirs],
            "score": pa.array([None if i % 7 else float(-i) for i in theirs], pa.float32()),
            "loss": pa.array([None if i % 5 else 1.0 for i in theirs], pa.float32()),
            "group_scores": pa.array([[float(i), 1.0] if i % 4 else [] for i in theirs], pa.list_(pa.float32())),
        }
    )
    found = brought(ids, table)
    for row, number in enumerate(range(0, 10000, 2)):
        if number % 3 or number >= 9999:
            assert np.isnan(found.loss_N[row])
            assert np.isnan(found.score_N[row])
            assert np.isnan(found.group_NJ[row]).all()
        else:
            assert np.isnan(found.loss_N[row]) == bool(number % 5)
            assert np.isnan(found.score_N[row]) if number % 7 else found.score_N[row] == -number
            assert found.group_NJ[row].tolist() == [number, 1.0] if number % 4 else np.isnan(found.group_NJ[row]).all()


# speculative


def test_speculative_gives_unverified_rows_their_stratums_mean_along_one_slope(
    setting: Setting, whole: LocalWork
) -> None:
    proxy = {"method": "length", "of": "answer"}
    coverage = {"method": "speculative", "proxy": proxy, "strata": 4, "sample": 6}
    work, summary = setting.score("speculative", coverage=coverage, **INFLUENCE)
    score, exact = column(work, "score"), column(work, "exact").astype(bool)
    cheap = column(work, "n_answer_tokens")
    stratum = np.minimum(((cheap - cheap.min()) / np.ptp(cheap) * 4).astype(int), 3)
    for one in range(4):
        assert exact[stratum == one].sum() == min(6, (stratum == one).sum())
    np.testing.assert_allclose(score[exact], column(whole, "score")[exact], rtol=1e-4, atol=1e-5)
    slope = np.polyfit(cheap[exact], score[exact], 1)[0]
    for row in np.flatnonzero(~exact):
        mine = exact & (stratum == stratum[row])
        expected = score[mine].mean() + slope * (cheap[row] - cheap[mine].mean())
        assert score[row] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert summary.facts["verified"] == exact.sum() < 90
    assert work.rows("quarantine") == []
    everything = {**coverage, "strata": 1, "sample": 90}
    work, _ = setting.score("everything", coverage=everything, **INFLUENCE)
    assert written(work) == written(whole)


# proxy_verify


def test_proxy_verify_computes_the_first_round_whole(setting: Setting, whole: LocalWork) -> None:
    work, summary = setting.score("first", coverage=PREDICT, **INFLUENCE)
    assert written(work) == written(whole)
    assert summary.facts["predicted"] == 0


def test_proxy_verify_predicts_within_its_tokens_and_verifies_the_best(drifted: Setting, fresh: np.ndarray) -> None:
    work, summary = drifted.score("predicted", coverage=PREDICT, **INFLUENCE)
    score, exact = column(work, "score"), column(work, "exact").astype(bool)
    np.testing.assert_allclose(score[exact], fresh[exact], rtol=1e-4, atol=1e-5)
    facts = summary.facts
    assert facts["predicted"] == (~exact).sum() > 30
    assert not facts["fallback"]
    assert facts["unverified_of_the_best"] == 0
    assert exact[np.argsort(-score)[:14]].all()  # 15 % of 90 rows, each computed
    target = sum(len(row.input_ids) for row in rows_of(6, seed=2))
    assert work.ledger().total.tokens - target <= 0.95 * column(work, "n_tokens").sum()
    assert spearmanr(score, fresh).statistic > 0.75  # half of the rows are predicted, from half of their tokens
    assert facts["estimated_spearman"] == pytest.approx(
        exact.mean() + (1 - exact.mean()) * facts["cross_validated_spearman"], abs=1e-3
    )


def test_proxy_verify_stops_verifying_when_its_tokens_are_used(drifted: Setting) -> None:
    coverage = {**PREDICT, "tokens": 0.9, "verify": 1}
    work, summary = drifted.score("short", coverage=coverage, **INFLUENCE)
    assert summary.facts["unverified_of_the_best"] > 0
    target = sum(len(row.input_ids) for row in rows_of(6, seed=2))
    assert work.ledger().total.tokens - target <= 0.9 * column(work, "n_tokens").sum()


def test_all_is_computed_exactly_where_the_estimate_is_below_what_is_asked(drifted: Setting, fresh: np.ndarray) -> None:
    _, summary = drifted.score("estimate", coverage=PREDICT, **INFLUENCE)
    estimate = summary.facts["estimated_spearman"]
    for least, falls in ((estimate + 0.001, True), (estimate - 0.001, False)):
        work, summary = drifted.score(f"least-{falls}", coverage={**PREDICT, "least": least}, **INFLUENCE)
        assert summary.facts["fallback"] is falls
        assert bool(column(work, "exact").all()) is falls
        assert any("every row is computed" in notice for notice in work.notices) is falls
        if falls:
            np.testing.assert_allclose(column(work, "score"), fresh, rtol=1e-4, atol=1e-5)


def test_all_is_computed_where_too_little_of_the_sample_can_be(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = []
    for index in range(80):  # of two thirds the prompt begins with a token that the model lacks: no glance sees it
        first = VOCABULARY + 1 if index % 3 else 1
        ids = [first, *random.integers(0, VOCABULARY, 13).tolist()]
        rows.append(odd_row(f"r{index:02d}", ids, [False] * 11 + [True] * 3))
    setting = make_setting(tmp_path, pool=rows, checkpoint=True)
    first_round, _ = setting.score("first", **INFLUENCE)
    setting.inputs["previous_scores"] = [first_round.artifact("scores")]
    work, summary = setting.score("second", coverage=PREDICT, **INFLUENCE)
    assert summary.facts["fallback"] is True
    assert summary.facts["estimated_spearman"] is None
    assert column(work, "exact").sum() == 27
    assert {row["reason"] for row in work.rows("quarantine")} == {"score_failed"}


def test_a_coverage_killed_between_its_passes_resumes_to_the_same_bytes(drifted: Setting) -> None:
    whole, _ = drifted.score("uncut", coverage=PREDICT, **INFLUENCE)
    drifted.score("cut", coverage=PREDICT, **INFLUENCE)
    shards = drifted.folder / "cut" / "scratch" / "shards"
    assert {path.name for path in shards.iterdir()} >= {"glance", "sample", "verify-1"}
    for path in [*(shards / "verify-1").iterdir(), *sorted((shards / "sample").iterdir())[1:]]:
        path.unlink()
    again, summary = drifted.score("cut", coverage=PREDICT, **INFLUENCE)
    assert written(again) == written(whole)
    assert summary.measured["shards_kept_from_before"] > 0
    assert again.ledger().total.flops == whole.ledger().total.flops


def test_a_shard_of_other_rows_is_scored_again(drifted: Setting) -> None:
    whole, _ = drifted.score("right", coverage=PREDICT, **INFLUENCE)
    drifted.score("wrong", coverage=PREDICT, **INFLUENCE)
    shards = drifted.folder / "wrong" / "scratch" / "shards"
    (glance,) = (shards / "glance").iterdir()
    first = min((shards / "sample").iterdir())
    first.write_bytes(glance.read_bytes())
    again, _ = drifted.score("wrong", coverage=PREDICT, **INFLUENCE)
    assert written(again) == written(whole)


@pytest.mark.parametrize("method", ["proxy_verify", "speculative"])
@pytest.mark.parametrize("scorer", ["length", "trak"])
def test_a_sample_of_what_costs_nothing_or_hangs_on_all_rows_is_refused(
    drifted: Setting, method: str, scorer: str
) -> None:
    with pytest.raises(ConfigError, match=r"use `full`"):
        drifted.score(f"{method}-{scorer}", coverage={"method": method}, scorer={"method": scorer})


# glance


def test_a_glance_is_the_beginning_of_the_answer_and_what_stands_before_it(setting: Setting) -> None:
    row = odd_row("r", range(10, 20), [False] * 5 + [True, True, False, True, True])
    assert Glance(2, 3).of(row).input_ids.tolist() == [13, 14, 15, 16, 17]
    assert Glance(2, 3).of(row).answer_mask.tolist() == [False, False, True, True, False]
    assert Glance(99, WHOLE).of(row).input_ids.tolist() == list(range(10, 20))
    table = setting.inputs["pool_tokens"].table()
    first = first_answers(table)
    assert first.tolist() == [int(np.argmax(mask)) for mask in table.column("answer_mask").to_pylist()]
    lengths = table.column("n_tokens").to_numpy()
    rows = {row.example_id: row for row in rows_of(90, seed=1)}
    for glance in (Glance(1, 2), Glance(4, WHOLE)):
        seen = [len(glance.of(rows[example_id]).input_ids) for example_id in table.column("example_id").to_pylist()]
        assert glance.lengths(first, lengths).tolist() == seen


def test_the_widest_glance_takes_whole_answers_first_and_keeps_its_share() -> None:
    random = np.random.default_rng(0)
    first, answers = random.integers(1, 200, 500), random.integers(1, 60, 500)
    lengths = first + answers
    for share, whole in ((0.1, False), (0.35, True), (0.9, True)):
        glance = widest(first, lengths, share)
        assert (glance.answer == WHOLE) is whole
        wider = Glance(glance.context + 1, WHOLE) if whole else Glance(glance.context, glance.answer + 1)
        assert glance.lengths(first, lengths).sum() <= share * lengths.sum() < wider.lengths(first, lengths).sum()
