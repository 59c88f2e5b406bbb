"""Selectors that compare rows: through the stage's own guard, on features as scoring leaves them, against oracles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_contracts.config import SelectConfig
from data_contracts.errors import BudgetError, ConfigError, InputError
from stages.coreset import similarity
from stages.gradients.quantised import Quantiser
from stages.select import coreset
from stages.select.methods.craig import nearness
from stages.select.methods.semdedup import first_of_their_kind
from stages.select.plain_features import select_embeddings, select_similarities
from stages.select.stage import STAGE, SelectSlice
from stages.stage import Artifact
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.select.pools import chosen, pool_of
from tests.stages.select.test_select import tokens_table

ROWS, WIDTH = 60, 16


def features_table(folder: Path, ids: list[str], feature: np.ndarray, bits: int = 16) -> Artifact:
    work = LocalWork(folder, {"t": "features"})
    quantiser = Quantiser(feature.shape[1], bits)
    code, scale = quantiser.encode(feature)
    columns = {"bits": [bits] * len(ids), "dimensions": [feature.shape[1]] * len(ids), "scale": scale.tolist()}
    work.table("t", {"example_id": ids, **columns, "code": [row.tobytes() for row in code]})
    return work.artifact("t")


def scored_table(folder: Path, ids: list[str], column_NJ: np.ndarray) -> Artifact:
    work = LocalWork(folder, {"t": "scores"})
    count = len(ids)
    values = {"score": column_NJ.mean(axis=1).tolist(), "group_scores": column_NJ.tolist(), "loss": [None] * count}
    lengths = {"n_tokens": [1] * count, "n_answer_tokens": [1] * count, "exact": [True] * count}
    work.table("t", {"example_id": ids, "source": ["s"] * count, **values, **lengths})
    return work.artifact("t")


class Pool:
    """Clustered features, scores for two groups, and a run of the stage over them."""

    def __init__(self, folder: Path, *, without: tuple[int, ...] = ()) -> None:
        rng = np.random.default_rng(3)
        self.folder, self.ids = folder, [f"r{row:03d}" for row in range(ROWS)]
        self.feature = rng.normal(size=(8, WIDTH))[rng.integers(8, size=ROWS)] + 0.3 * rng.normal(size=(ROWS, WIDTH))
        self.feature = self.feature.astype(np.float32)
        self.column = rng.normal(size=(ROWS, 2)).astype(np.float32)
        kept = [row for row in range(ROWS) if row not in without]
        self.inputs = {
            "pool_tokens": tokens_table(folder / "tokens", self.ids, [10 + row % 7 for row in range(ROWS)]),
            "features": features_table(folder / "features", [self.ids[row] for row in kept], self.feature[kept]),
            "scores": scored_table(folder / "scores", self.ids, self.column),
        }

    def select(self, name: str, *, drop: tuple[str, ...] = (), **config: Any) -> tuple[list[dict[str, Any]], LocalWork]:
        work = work_for(STAGE, self.folder / name)
        given = {key: value for key, value in self.inputs.items() if key not in drop}
        STAGE.run(SelectSlice(seed=1, select=SelectConfig(**config)), inputs_of(**given), work)
        return work.rows("selection"), work


@pytest.mark.parametrize(
    "method", ["facility_location", "graph_cut", "k_center", "dpp", "craig", "grad_match", "semdedup", "bids"]
)
def test_each_chooses_what_was_asked_with_falling_gains_and_again_the_same(tmp_path: Path, method: str) -> None:
    pool = Pool(tmp_path)
    rows, _ = pool.select("once", selector={"method": method}, count=8)
    again, _ = pool.select("again", selector={"method": method}, count=8)
    assert rows == again
    assert 1 <= len(rows) <= 8
    assert len({row["example_id"] for row in rows}) == len(rows)
    if method != "bids":
        assert (np.diff([row["gain"] for row in rows]) <= 1e-6).all()
    np.testing.assert_allclose(np.mean([row["weight"] for row in rows]), 1, rtol=1e-5)
    assert all("{" not in row["reason"] and row["reason"] for row in rows)


def test_facility_location_covers_the_pool_better_than_chance_and_near_the_best_found(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    rows, _ = pool.select("fl", selector={"method": "facility_location"}, count=8)
    cosine = np.clip(similarity.unit_rows(pool.feature) @ similarity.unit_rows(pool.feature).T, 0, 1)
    covered = cosine[[pool.ids.index(row["example_id"]) for row in rows]].max(axis=0).sum()
    np.testing.assert_allclose(covered, sum(row["gain"] for row in rows), rtol=2e-3)
    rng = np.random.default_rng(0)
    chance = [cosine[rng.choice(ROWS, 8, replace=False)].max(axis=0).sum() for _ in range(200)]
    assert covered > max(chance)


def test_many_rows_take_the_sparse_way_and_choose_nearly_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(tmp_path)
    dense, _ = pool.select("dense", selector={"method": "facility_location"}, count=8)
    for module in (similarity, coreset):
        monkeypatch.setattr(module, "DENSE_BYTES", 4 * (ROWS - 1) ** 2)
    settings = {"method": "facility_location", "neighbours": 20}
    sparse, _ = pool.select("sparse", selector=settings, count=8)
    unit = similarity.unit_rows(pool.feature)

    def covered(rows: list[dict[str, Any]]) -> float:
        return float((unit[[pool.ids.index(row["example_id"]) for row in rows]] @ unit.T).max(axis=0).sum())

    assert covered(sparse) > 0.97 * covered(dense)
    for method in ("graph_cut", "craig"):
        with pytest.raises(BudgetError, match="60 rows would take"):
            pool.select(method, selector={"method": method}, count=8)


def test_a_row_without_a_feature_is_never_chosen_and_is_counted(tmp_path: Path) -> None:
    pool = Pool(tmp_path, without=(0, 5, 59))
    rows, work = pool.select("all", selector={"method": "facility_location"}, count=ROWS)
    assert len(rows) == ROWS - 3
    assert not {"r000", "r005", "r059"} & {row["example_id"] for row in rows}
    assert work.notices == ["only 57 of 60 could be filled: 3 rows have no feature"]


def test_best_keeps_the_choice_among_the_best_by_score_and_tokens_are_a_quota(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    rows, _ = pool.select("best", selector={"method": "facility_location", "best": 0.2}, tokens=60)
    best = set(np.argsort(-pool.column.mean(axis=1))[:12].tolist())
    chosen = [pool.ids.index(row["example_id"]) for row in rows]
    assert set(chosen) <= best
    lengths = np.array([10 + row % 7 for row in range(ROWS)])
    assert lengths[chosen].sum() <= 60 < lengths[chosen].sum() + 17
    with pytest.raises(ConfigError, match="there are none"):
        pool.select("none", drop=("scores",), selector={"method": "dpp", "best": 0.5}, count=3)


def test_without_features_or_groups_the_remedy_is_named(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    with pytest.raises(ConfigError, match="store_bits"):
        pool.select("a", drop=("features",), selector={"method": "k_center"}, count=3)
    pool.inputs["scores"] = scored_table(tmp_path / "single", pool.ids, pool.column[:, :1])
    with pytest.raises(ConfigError, match=r"score\.groups"):
        pool.select("b", selector={"method": "bids"}, count=3)
    pool.inputs["features"] = features_table(tmp_path / "other", ["zz"], np.ones((1, 4), dtype=np.float32))
    with pytest.raises(InputError, match="no example in common"):
        pool.select("c", selector={"method": "k_center"}, count=3)


def test_craig_weighs_a_row_by_the_rows_it_stands_for_and_nears_the_mean_gradient(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    rows, _ = pool.select("craig", selector={"method": "craig"}, count=8)
    chosen = [pool.ids.index(row["example_id"]) for row in rows]
    distance = np.linalg.norm(pool.feature[:, None] - pool.feature[None], axis=2)
    np.testing.assert_allclose(nearness(pool.feature), distance.max() - distance, atol=2e-2)
    counts = np.bincount(distance[:, chosen].argmin(axis=1), minlength=len(chosen))
    np.testing.assert_allclose([row["weight"] for row in rows], counts * len(chosen) / ROWS, rtol=1e-5)
    mean = pool.feature.mean(axis=0)
    error = np.linalg.norm(counts / ROWS @ pool.feature[chosen] - mean)
    rng = np.random.default_rng(0)
    chance = [np.linalg.norm(pool.feature[rng.choice(ROWS, 8, replace=False)].mean(axis=0) - mean) for _ in range(200)]
    assert error < np.quantile(chance, 0.05)


def test_craig_is_greedy_and_its_error_within_the_bound_of_what_it_maximises(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    rows, _ = pool.select("craig", selector={"method": "craig"}, count=8)
    feature = pool.feature.astype(np.float64)
    distance = np.linalg.norm(feature[:, None] - feature[None], axis=2)
    taken: list[int] = []
    nearest = np.full(ROWS, distance.max())
    for _ in range(8):  # greedy in float64, looking at every row every time
        taken.append(int(np.minimum(nearest, distance).sum(axis=1).argmin()))
        nearest = np.minimum(nearest, distance[taken[-1]])
    assert [pool.ids.index(row["example_id"]) for row in rows] == taken
    weight = np.array([row["weight"] for row in rows]) * ROWS / 8
    error = np.linalg.norm(feature.sum(axis=0) - weight @ feature[taken])
    assert error <= nearest.sum() * (1 + 1e-5)  # Mirzasoleiman et al. 2020, eq. 5


def test_grad_match_has_the_error_of_the_pursuit_solved_anew_also_under_a_token_quota(tmp_path: Path) -> None:
    from scipy.optimize import nnls

    pool = Pool(tmp_path)
    feature = Quantiser(WIDTH, 16).decode(*Quantiser(WIDTH, 16).encode(pool.feature)).astype(np.float64)
    mean = feature.mean(axis=0)
    taken: list[int] = []
    residual = mean
    for _ in range(6):
        along = feature @ residual
        along[taken] = -np.inf
        taken.append(int(along.argmax()))
        weight = nnls(feature[taken].T, mean)[0]
        residual = mean - weight @ feature[taken]
    lengths = [10 + row % 7 for row in taken]
    for quota in ({"count": 6}, {"tokens": sum(lengths) + 1}):
        rows, _ = pool.select(f"match{len(quota)}{[*quota]}", selector={"method": "grad_match", "ridge": 0.0}, **quota)
        got = np.array([pool.ids.index(row["example_id"]) for row in rows])
        assert got.tolist() == [row for row, of in zip(taken, weight, strict=True) if of > 0]
        np.testing.assert_allclose(
            [row["weight"] for row in rows], weight[weight > 0] / weight[weight > 0].mean(), rtol=1e-3
        )


def test_grad_match_meets_the_mean_gradient_closer_than_equal_weights_do(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    rows, _ = pool.select("match", selector={"method": "grad_match", "ridge": 0.0}, count=8)
    chosen = [pool.ids.index(row["example_id"]) for row in rows]
    weight, mean = np.array([row["weight"] for row in rows]), pool.feature.mean(axis=0)
    met = weight @ pool.feature[chosen]
    scale = met @ mean / (met @ met)  # a mean weight of 1 leaves the length free
    even = pool.feature[chosen].mean(axis=0)
    even_scale = even @ mean / (even @ even)
    assert np.linalg.norm(scale * met - mean) < np.linalg.norm(even_scale * even - mean)
    assert np.linalg.norm(scale * met - mean) < 0.25 * np.linalg.norm(mean)


def test_bids_raises_the_worst_group_where_one_has_ten_times_the_scale(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    column = (rng.normal(size=(400, 3)) * [10.0, 1.0, 1.0]).astype(np.float32)
    unit = (column - column.mean(axis=0)) / column.std(axis=0)
    rows = chosen(pool_of(column=column), "bids", count=40).rows
    top = chosen(pool_of(column=column), "top_k", count=40).rows  # by the mean over groups
    assert unit[rows].mean(axis=0).min() > 3 * unit[top].mean(axis=0).min()
    assert unit[rows].mean() >= 0.99 * unit[top].mean()
    scaled = chosen(pool_of(column=column * [0.01, 100.0, 1.0]), "bids", count=40).rows
    assert scaled.tolist() == rows.tolist()  # whatever the scales
    taken = unit[rows[:5]].mean(axis=0)  # the rule, said again
    left = [row for row in range(400) if row not in rows[:5]]
    assert rows[5] == max(left, key=lambda row: (unit[row] - taken).max())


def test_semdedup_leaves_repetitions_for_the_end(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    copy = pool.feature.copy()
    copy[30:] = copy[:30] * 1.001  # every row has a twin
    pool.inputs["features"] = features_table(tmp_path / "twins", pool.ids, copy)
    rows, _ = pool.select("dedup", selector={"method": "semdedup", "epsilon": 0.001}, count=ROWS)
    pairs = [pool.ids.index(row["example_id"]) % 30 for row in rows]
    assert len(set(pairs[:30])) == 30
    gains = [row["gain"] for row in rows]
    assert gains[:30] == sorted(gains[:30], reverse=True)
    assert gains[30:] == sorted(gains[30:], reverse=True)


def test_a_dpp_says_why_it_stops(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    rows, work = pool.select("dpp", selector={"method": "dpp"}, count=40)
    assert len(rows) <= WIDTH
    assert "probability zero" in work.notices[0]


def test_repetitions_are_found_however_many_there_are() -> None:
    rng = np.random.default_rng(0)
    one = similarity.unit_rows(np.ones(WIDTH) + 0.1 * rng.normal(size=(400, WIDTH)))
    assert (one @ one.T).min() > 0.9
    assert first_of_their_kind(one, 0.9).tolist() == [True] + [False] * 399
    unit = similarity.unit_rows(rng.normal(size=(700, 3)))
    kept = first_of_their_kind(unit, 0.9)
    for row in range(700):  # the rule, said again
        earlier = unit[:row][kept[:row]]
        assert kept[row] == (not len(earlier) or float((earlier @ unit[row]).max()) <= 0.9)


def test_graph_cut_refuses_similarities_that_are_not_symmetric(tmp_path: Path) -> None:
    file = tmp_path / "asym.csv"
    file.write_text("id,a,b\na,1,0\nb,5,1\n")
    with pytest.raises(ConfigError, match="not symmetric"):
        select_similarities(file, SelectConfig(count=1, selector={"method": "graph_cut"}), np.random.default_rng(0))


def test_a_row_without_a_score_for_each_group_is_not_balanced(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    work = LocalWork(tmp_path / "cascade", {"t": "scores"})
    columns = [row.tolist() if place < 20 else [] for place, row in enumerate(pool.column)]
    values = {"score": pool.column.mean(axis=1).tolist(), "group_scores": columns, "loss": [None] * ROWS}
    lengths = {"n_tokens": [1] * ROWS, "n_answer_tokens": [1] * ROWS, "exact": [place < 20 for place in range(ROWS)]}
    work.table("t", {"example_id": pool.ids, "source": ["s"] * ROWS, **values, **lengths})
    pool.inputs["scores"] = work.artifact("t")
    rows, _ = pool.select("bids", selector={"method": "bids"}, count=30)
    assert sorted(row["example_id"] for row in rows) == pool.ids[:20]


def test_a_dpp_with_one_far_score_goes_on(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    column = pool.column.copy()
    column[7] = 1e6
    pool.inputs["scores"] = scored_table(tmp_path / "far", pool.ids, column)
    rows, _ = pool.select("dpp", selector={"method": "dpp", "strength": 40.0}, count=10)
    assert len(rows) == 10
    assert rows[0]["example_id"] == "r007"


def test_weights_under_a_token_quota_are_those_of_the_rows_taken(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    settings = {"method": "grad_match", "ridge": 0.0}
    by_count, _ = pool.select("count", selector=settings, count=3)
    tokens = sum(10 + pool.ids.index(row["example_id"]) % 7 for row in by_count)
    by_tokens, _ = pool.select("tokens", selector=settings, tokens=tokens)
    assert [(row["example_id"], row["weight"]) for row in by_tokens] == [
        (row["example_id"], row["weight"]) for row in by_count
    ]


def test_distances_do_not_cancel_far_from_the_origin() -> None:
    near = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    np.testing.assert_allclose(nearness(near + 1000), nearness(near), atol=5e-3)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ('{"id": "a", "vec": [1e30, 0]}', "beyond"),
        ('{"id": "a", "vec": [' + "9" * 400 + ", 0]}", "beyond"),
        ('{"id": "\\ud800", "vec": [1, 0]}', "half a character"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_what_is_no_vector_is_listed_and_the_others_are_chosen_from(tmp_path: Path, lines: str, found: str) -> None:
    file = tmp_path / "e.jsonl"
    file.write_text(lines + '\n{"id": "good", "vec": [0, 1]}\n')
    plain = select_embeddings(file, SelectConfig(count=1, selector={"method": "craig"}), np.random.default_rng(0))
    assert plain.selection.column("example_id").to_pylist() == ["good"]
    assert found in plain.refused[0].detail.lower()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"id,a,b\na,1,0,7\nb,0,1\n", "row 2 of s.csv has 3"),
        (b"id,a\na,1e39\n", "1e39"),
        (b"id,a\na,1_0\n", "1_0"),
        (b"id,\xff\n\xff,1\n", "utf-8"),
    ],
)
def test_what_is_no_similarity_is_refused_by_its_place(tmp_path: Path, content: bytes, found: str) -> None:
    file = tmp_path / "s.csv"
    file.write_bytes(content)
    with pytest.raises(InputError, match=found):
        select_similarities(file, SelectConfig(count=1, selector={"method": "k_center"}), np.random.default_rng(0))
