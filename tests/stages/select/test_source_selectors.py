"""Selectors over features, source by source or cluster by cluster, against their rules said again."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.config import SelectConfig
from data_contracts.errors import BudgetError, InputError
from stages.coreset import similarity
from stages.coreset.medoids import nearness_l1
from stages.coreset.similarity import unit_rows
from stages.select import coreset
from stages.select.methods.d4 import nearest_before
from stages.select.plain_features import select_embeddings
from stages.select.sources import coded
from tests.stages.select.pools import chosen, pool_of

RNG = np.random.default_rng(5)
FEATURE = (RNG.normal(size=(6, 8))[RNG.integers(6, size=90)] + 0.4 * RNG.normal(size=(90, 8))).astype(np.float32)
SOURCE = ["a"] * 50 + ["b"] * 30 + ["c"] * 10
SCORE = RNG.normal(size=90).astype(np.float32)


def plain_greedy(near: np.ndarray, count: int) -> list[int]:
    """Facility location by looking at everything, in float64."""
    taken: list[int] = []
    nearest = np.zeros(near.shape[1])
    for _ in range(count):
        gain = np.maximum(near - nearest, 0).sum(axis=1)
        gain[taken] = -1
        taken.append(int(gain.argmax()))
        nearest = np.maximum(nearest, near[taken[-1]])
    return taken


def test_lima_takes_the_good_rows_of_every_source_that_stand_for_the_others() -> None:
    found = chosen(pool_of(score=SCORE, feature=FEATURE, source=SOURCE), "lima", quality=0.6, count=12)
    rows, source = found.rows, np.array(SOURCE)
    assert Counter(source[rows]) == {"a": 4, "b": 4, "c": 4}
    for name in "abc":
        here = np.flatnonzero(source == name)
        good = here[SCORE[here] >= np.quantile(SCORE[here], 0.6)]
        assert len(good) == round(0.4 * len(here))
        unit = unit_rows(FEATURE[good]).astype(np.float64)
        expected = good[plain_greedy(np.maximum(unit @ unit.T, 0), 4)]
        assert rows[source[rows] == name].tolist() == expected.tolist()
    share = chosen(
        pool_of(score=SCORE, feature=FEATURE, source=SOURCE), "lima", budget="proportional", quality=0, count=18
    )
    assert Counter(source[share.rows]) == {"a": 10, "b": 6, "c": 2}
    notices: list[str] = []
    chosen(pool_of(score=SCORE, feature=FEATURE, source=SOURCE), "lima", quality=0.6, count=50, notices=notices)
    assert notices == ["36 rows were chosen of 50 rows: the others score below the `quality` quantile of their source"]


def test_medoids_stand_for_their_sources_by_share_and_weigh_what_they_stand_for() -> None:
    found = chosen(pool_of(feature=FEATURE, source=SOURCE), "medoids", small=0.12, count=26)
    rows, source = found.rows, np.array(SOURCE)
    assert Counter(source[rows]) == {"c": 10, "a": 10, "b": 6}  # c whole, then 16 as 50 to 30
    weight = np.array(found.table.column("weight"))
    expected = np.ones(len(rows))
    for name in "ab":
        here = np.flatnonzero(source == name)
        distance = np.abs(FEATURE[here, None].astype(np.float64) - FEATURE[None, here]).sum(axis=2)
        order = plain_greedy(distance.max() - distance, {"a": 10, "b": 6}[name])
        mine = source[rows] == name
        assert rows[mine].tolist() == here[order].tolist()
        expected[mine] = np.bincount(distance[order].argmin(axis=0), minlength=len(order))
    np.testing.assert_allclose(weight, expected * len(rows) / expected.sum(), rtol=1e-5)


def test_medoids_keep_the_dimensions_of_the_largest_mean_and_refuse_a_source_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feature = FEATURE.copy()
    feature[:, 3] += 5
    feature[:, 6] -= 4
    distance = np.abs(feature[:, None, [3, 6]] - feature[None, :, [3, 6]]).sum(axis=2)
    np.testing.assert_allclose(nearness_l1(feature, 2), distance.max() - distance, atol=1e-4)
    monkeypatch.setattr(similarity, "DENSE_BYTES", 4 * 49**2)
    monkeypatch.setattr(coreset, "DENSE_BYTES", 4 * 49**2)
    with pytest.raises(BudgetError, match="50 rows would take"):
        chosen(pool_of(feature=FEATURE, source=SOURCE), "medoids", count=5)


def test_equal_rows_of_a_source_are_stood_for_by_one() -> None:
    notices: list[str] = []
    found = chosen(pool_of(feature=np.ones((9, 3)), source=["a"] * 6 + ["b"] * 3), "medoids", count=6, notices=notices)
    assert found.table.column("weight").to_pylist() == pytest.approx([4 / 3, 2 / 3])
    assert "repeat a gradient" in notices[0]


def test_d4_leaves_out_repetitions_then_what_is_typical() -> None:
    rng = np.random.default_rng(0)
    centre = 8 * np.eye(4, 12)
    own = centre[np.repeat(np.arange(4), 30)] + rng.normal(size=(120, 12))
    feature = np.concatenate([own, own[:40] * 1.0001])  # 40 rows have a twin
    found = chosen(pool_of(feature=feature), "d4", clusters=4, dedup=0.75, prototypes=0.5, count=60)
    rows = found.rows
    assert set(found.table.column("reason").to_pylist()) == {"drawn from rows neither repeated nor typical"}
    assert len({row % 120 for row in rows.tolist()}) == 60  # none with its twin
    unit = unit_rows(feature)
    label = np.concatenate([np.repeat(np.arange(4), 30), np.repeat(np.arange(4), 30)[:40]])
    mean = np.stack([unit[label == cluster].mean(axis=0) for cluster in range(4)])
    away = np.linalg.norm(unit - mean[label], axis=1)
    assert away[rows].mean() > np.quantile(away, 0.6)  # the half far from its centre
    every = chosen(pool_of(feature=feature), "d4", clusters=4, dedup=0.75, prototypes=0.5, count=160)
    reasons = [(text, reason) for text, reason in Counter(every.table.column("reason").to_pylist()).items()]
    assert [count for _, count in reasons] == [60, 60, 40]
    assert every.rows[:60].tolist() == rows.tolist()
    typical = every.rows[60:120]
    assert away[rows].min() > away[typical].mean()


def test_what_is_before_a_row_is_farther_from_the_centre_of_its_cluster() -> None:
    rng = np.random.default_rng(1)
    unit = unit_rows(rng.normal(size=(700, 5)))
    label, square = rng.integers(3, size=700), rng.random(700).round(1)
    got = nearest_before(unit, label, square)
    for row in range(0, 700, 7):
        before = [
            other
            for other in range(700)
            if label[other] == label[row] and (square[other], -other) > (square[row], -row)
        ]
        expected = max((float(unit[row] @ unit[other]) for other in before), default=-1.0)
        np.testing.assert_allclose(got[row], expected, atol=1e-6)


@pytest.mark.parametrize(("concave", "formula"), [("sqrt", np.sqrt), ("log", np.log1p)])
def test_feature_based_takes_what_adds_most_of_every_feature(concave: str, formula: np.ufunc) -> None:
    found = chosen(pool_of(feature=FEATURE), "feature_based", concave=concave, count=6)
    unit = unit_rows(FEATURE).astype(np.float64)
    amount = np.concatenate([np.maximum(unit, 0), np.maximum(-unit, 0)], axis=1)
    total, gains = np.zeros(16), []
    for row in found.rows:
        every = formula(total + amount).sum(axis=1) - formula(total).sum()
        assert every[row] == pytest.approx(np.delete(every, found.rows[: len(gains)]).max())
        gains.append(every[row])
        total += amount[row]
    np.testing.assert_allclose(found.table.column("gain").to_pylist(), gains, rtol=1e-5)


def test_with_epsilon_facility_location_is_stochastic_greedy_by_the_seed() -> None:
    feature = np.random.default_rng(0).normal(size=(300, 8))

    def covered(seed: int, epsilon: float) -> tuple[list[int], float]:
        found = chosen(pool_of(feature=feature), "facility_location", count=30, epsilon=epsilon, seed=seed)
        return found.rows.tolist(), sum(found.table.column("gain").to_pylist())

    exact, some, again, other = covered(0, 0.0), covered(0, 0.1), covered(0, 0.1), covered(1, 0.1)
    assert some == again
    assert some[0] != other[0]
    assert exact[1] > some[1] > 0.95 * exact[1]
    assert len(set(some[0])) == 30


def test_scores_and_embeddings_of_two_files_are_joined_by_id(tmp_path) -> None:
    vectors, scores = tmp_path / "e.jsonl", tmp_path / "s.csv"
    vectors.write_text(
        '{"id": "b", "vec": [1, 0]}\n{"id": "a", "vec": [1, 0.01]}\n{"id": "x", "vec": [0, 1]}\n{"id": "c", "vec": [0, 1]}\n'
    )
    scores.write_text("id,score,source\nd,9,q\nc,1,q\nb,3,p\na,2,p\n")
    config = SelectConfig(count=2, selector={"method": "semdedup"})
    found = select_embeddings(vectors, config, np.random.default_rng(0), scores=scores)
    rows = found.selection.to_pylist()
    assert [(row["example_id"], row["mixture"], row["gain"]) for row in rows] == [("b", "p", 3.0), ("c", "q", 1.0)]
    assert [(item.example_id, item.detail) for item in found.refused] == [("x", "it has no score")]
    lima = SelectConfig(count=2, selector={"method": "lima", "quality": 0.5})
    found = select_embeddings(vectors, lima, np.random.default_rng(0), scores=scores)
    assert sorted(row["example_id"] for row in found.selection.to_pylist()) == ["b", "c"]
    scores.write_text("id,score\nq,1\n")
    with pytest.raises(InputError, match="no id in common"):
        select_embeddings(vectors, config, np.random.default_rng(0), scores=scores)


def test_embeddings_may_name_their_source_and_length(tmp_path) -> None:
    vectors = tmp_path / "e.jsonl"
    lines = [f'{{"id": "{n}", "vec": [{n}, 1], "source": "{"ab"[n % 2]}", "n_tokens": 5}}' for n in range(8)]
    vectors.write_text("\n".join(lines))
    config = SelectConfig(tokens=20, selector={"method": "medoids"})
    rows = select_embeddings(vectors, config, np.random.default_rng(0)).selection.to_pylist()
    assert Counter(row["mixture"] for row in rows) == {"a": 2, "b": 2}


def test_sources_are_numbered_by_name() -> None:
    column = pa.chunked_array([["b", "a"], ["c", "a"]])
    code, names = coded(column, np.array([3, 2, 0]))
    assert names == ("a", "b", "c")
    assert code.tolist() == [0, 2, 1]
