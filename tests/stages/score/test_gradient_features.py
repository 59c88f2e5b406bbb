"""LESS and TRAK inside the stage against explicit gradients in float64, and the features they leave."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from data_contracts.errors import ArtifactError, InputError
from stages.gradients.projection import Projection
from stages.gradients.quantised import Quantiser
from stages.gradients.sketch import SparseSketch
from stages.gradients.stored import decoded
from stages.model.checkpoint import load_checkpoint
from stages.score import features, partition
from stages.score.blocks import Outcome
from stages.score.features import FeatureScorer, gathered, rescored
from stages.score.scorer import Feature
from stages.score.shards import ShardFolder
from stages.stage import Artifact
from tests.stages.gradients.small_models import rows_of
from tests.stages.gradients.test_inner_product import explicit_gradient
from tests.stages.score.setting import ADAM, Setting, checkpoint_of, make_setting, odd_row, tokens_of

POOL, TARGET = rows_of(24, seed=1), rows_of(6, seed=2)
GROUPS = {"a": [1, 3, 4], "b": [0, 2, 5]}
WIDE = 2**16
"""So many places for the tiny model's 5,000 weights that hardly two meet: next to no projection."""


def mean_gradients(trained: Any, rows: list[Any]) -> list[dict[str, Tensor]]:
    found = []
    for row in rows:
        gradient, _, tokens = explicit_gradient(trained.model, row)
        found.append({name: value / tokens for name, value in gradient.items()})
    return found


def unit(gradient: dict[str, Tensor], sketch: SparseSketch | None) -> np.ndarray:
    """Return the direction of a gradient, or that of its projection."""
    whole = torch.cat([value.flatten() for value in gradient.values()]).double().numpy()
    vector = np.asarray(whole if sketch is None else sketch.of(gradient))
    return np.asarray(vector / np.linalg.norm(vector))


def explicit_less(
    setting: Setting, checkpoint: Artifact, members: list[int], sketch: SparseSketch | None = None
) -> np.ndarray:
    """Return the cosines of one checkpoint with one group, in float64."""
    trained = load_checkpoint(checkpoint.folder, setting.pin, dtype=torch.float64)
    goal = np.mean(
        [unit(gradient, sketch) for gradient in mean_gradients(trained, [TARGET[i] for i in members])], axis=0
    )
    found = []
    for gradient in mean_gradients(trained, POOL):
        update = {}
        for name, g in gradient.items():
            m, v = trained.moments[name]
            raised = ADAM["beta2"] * v + (1 - ADAM["beta2"]) * g**2
            update[name] = (0.9 * m + 0.1 * g) / torch.sqrt(raised + ADAM["epsilon"])
        found.append(unit(update, sketch) @ goal)
    return np.array(found)


@pytest.mark.parametrize("dimensions", [512, WIDE])
def test_less_is_the_cosine_of_adams_update_with_the_target(tmp_path: Path, dimensions: int) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    work, _ = setting.score(scorer={"method": "less", "dimensions": dimensions}, groups="source", combine="max")
    sketch = SparseSketch(dimensions, seed=work.seed("score", "less"))
    rows = work.rows("scores")
    columns = np.array([row["group_scores"] for row in rows])
    for projection, off in ((sketch, 1e-4), *([(None, 0.01)] if dimensions == WIDE else [])):
        checkpoint = setting.inputs["checkpoint"]
        expected = np.stack([explicit_less(setting, checkpoint, group, projection) for group in GROUPS.values()], 1)
        np.testing.assert_allclose(columns, expected, atol=off)
        assert np.corrcoef(columns.ravel(), expected.ravel())[0, 1] > 0.99
    np.testing.assert_allclose([row["score"] for row in rows], columns.max(axis=1), rtol=1e-6)


def test_less_weighs_checkpoints_by_their_learning_rates(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    first = checkpoint_of(tmp_path / "first", setting.pin, seed=3, learning_rate=3e-4)
    last = checkpoint_of(tmp_path / "last", setting.pin, seed=4, learning_rate=1e-4)
    setting.inputs["checkpoint"] = [first, last]  # type: ignore[assignment]
    work, _ = setting.score(scorer={"method": "less", "dimensions": WIDE, "store_bits": 16})
    found = np.array([row["score"] for row in work.rows("scores")])
    every = list(range(6))
    expected = 0.75 * explicit_less(setting, first, every) + 0.25 * explicit_less(setting, last, every)
    np.testing.assert_allclose(found, expected, atol=0.01)
    assert work.rows("features")[0]["dimensions"] == 2 * WIDE
    with_both, _ = setting.score("both", scorer={"method": "perplexity"})
    setting.inputs["checkpoint"] = last
    with_last, _ = setting.score("last", scorer={"method": "perplexity"})
    assert with_both.rows("scores") == with_last.rows("scores"), "who reads one checkpoint reads the last"


def test_features_of_a_stretch_without_a_computed_row_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.score.output.STRETCH", 4)
    setting = make_setting(tmp_path, checkpoint=True)
    cascade = {"method": "cascade", "filters": [{"method": "length", "keep": 0.1}]}
    scorer = {"method": "less", "dimensions": 64, "store_bits": 8}
    work, _ = setting.score("few", scorer=scorer, coverage=cascade)
    exact = [row["example_id"] for row in work.rows("scores") if row["exact"]]
    assert [row["example_id"] for row in work.rows("features")] == exact
    assert 0 < len(exact) < 4


def test_less_without_moments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="Adam moments of every trainable parameter"):
        make_setting(tmp_path).score(scorer={"method": "less", "dimensions": 64})


def explicit_trak(setting: Setting, sketch: SparseSketch, groups: list[list[int]], share: float) -> np.ndarray:
    trained = load_checkpoint(setting.inputs["checkpoint"].folder, setting.pin, dtype=torch.float64)

    def phi(row: Any) -> tuple[np.ndarray, float]:
        gradient, loss, tokens = explicit_gradient(trained.model, row)
        p = np.exp(-loss / tokens)
        margin = {name: -value / tokens / (1 - p) for name, value in gradient.items()}  # d log(p / (1 - p))
        return sketch.of(margin).numpy(), 1 - p

    pool, target = [phi(row) for row in POOL], np.stack([phi(row)[0] for row in TARGET])
    features_NK, doubt_N = np.stack([p for p, _ in pool]), np.array([q for _, q in pool])
    kernel = features_NK.T @ features_NK
    kernel += share * np.trace(kernel) / len(kernel) * np.eye(len(kernel))
    means = np.stack([target[members].mean(axis=0) for members in groups])
    return (features_NK @ np.linalg.inv(kernel) @ means.T) * doubt_N[:, None]


@pytest.mark.parametrize("batch_tokens", [64, 4096])
def test_trak_is_the_regularised_inverse_kernel_between_margin_gradients(
    tmp_path: Path, batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.gradients.stored.ROWS_AT_ONCE", 5)
    setting = make_setting(tmp_path, checkpoint=True)
    scorer = {"method": "trak", "dimensions": 128, "regularisation": 0.1}
    work, _ = setting.score(scorer=scorer, groups="source", batch_tokens=batch_tokens)
    expected = explicit_trak(setting, SparseSketch(128, seed=work.seed("score", "trak")), list(GROUPS.values()), 0.1)
    rows = work.rows("scores")
    np.testing.assert_allclose([row["group_scores"] for row in rows], expected, atol=1e-3 * np.abs(expected).max())
    np.testing.assert_allclose(
        [row["score"] for row in rows], expected.mean(axis=1), atol=1e-3 * np.abs(expected).max()
    )
    assert "features" not in work.opened


def test_a_step_along_traks_best_example_raises_the_targets_margin(tmp_path: Path) -> None:
    """With much regularisation TRAK is a plain product of margin gradients: its sign is that of a small step."""
    setting = make_setting(tmp_path, checkpoint=True)
    found = setting.scores(scorer={"method": "trak", "dimensions": 2048, "regularisation": 1e6})
    best = max(found, key=lambda example_id: found[example_id]["score"])
    trained = load_checkpoint(setting.inputs["checkpoint"].folder, setting.pin, dtype=torch.float64)

    def margin() -> float:
        losses = [loss / tokens for _, loss, tokens in (explicit_gradient(trained.model, row) for row in TARGET)]
        return float(np.mean([-loss - np.log(-np.expm1(-loss)) for loss in losses]))

    before = margin()
    (gradient,) = mean_gradients(trained, [row for row in POOL if row.example_id == best])
    with torch.no_grad():
        for name, parameter in trained.model.named_parameters():
            parameter.sub_(1e-4 * gradient[name])
    assert margin() > before


@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_features_are_stored_as_configured_and_decode_to_what_was_scored(tmp_path: Path, bits: int) -> None:
    past_embedding = odd_row("99-bad", [1, 99, 2], [False, True, True])
    setting = make_setting(tmp_path, pool=[*POOL, past_embedding], checkpoint=True)
    work, _ = setting.score(scorer={"method": "less", "dimensions": 512, "store_bits": bits}, batch_tokens=64)
    table = work.artifact("features").table()
    assert table.column("example_id").to_pylist() == sorted(row.example_id for row in POOL)
    assert set(table.column("bits").to_pylist()) == {bits}
    assert {len(code) for code in table.column("code").to_pylist()} == {Quantiser(512, bits).code_bytes}  # type: ignore[arg-type]
    stored = np.concatenate([feature for _, feature in decoded(table)])
    exact, _ = make_setting(tmp_path / "exact", checkpoint=True).score(
        scorer={"method": "less", "dimensions": 512, "store_bits": 16}, batch_tokens=64
    )
    whole = np.concatenate([feature for _, feature in decoded(exact.artifact("features").table())])
    cosine = (stored * whole).sum(axis=1) / np.linalg.norm(stored, axis=1) / np.linalg.norm(whole, axis=1)
    assert cosine.min() > {1: 0.7, 4: 0.98, 8: 0.9999, 16: 0.999999}[bits]


@pytest.mark.parametrize("metric", ["plain", "adam"])
def test_influence_leaves_features_of_the_same_pass_and_scores_as_without_them(tmp_path: Path, metric: str) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    plain, _ = setting.score("plain", scorer={"method": "influence"}, batch_tokens=64)
    scorer = {"method": "influence", "store_bits": 16, "per_layer": 6, "metric": metric}
    work, _ = setting.score("kept", scorer=scorer, batch_tokens=64)
    assert work.artifact("scores").ref.digest == plain.artifact("scores").ref.digest
    trained = load_checkpoint(setting.inputs["checkpoint"].folder, setting.pin)
    model, adam = trained.model, {"moments": trained.moments, "updates": 4, **ADAM}
    projection = Projection(model, per_layer=(6, 6), seed=0, **(adam if metric == "adam" else {}))  # type: ignore[arg-type]
    (found,) = [feature for _, feature in decoded(work.artifact("features").table())]
    for row, feature_K in zip(POOL, found, strict=True):
        expected_K = projection.project(explicit_gradient(model, row)[0]).numpy()
        np.testing.assert_allclose(feature_K, expected_K, atol=2e-3 * np.abs(expected_K).max())
    extra = work.ledger().total.flops - plain.ledger().total.flops
    # q, k, v, o: 16 in; 16, 8, 8, 16 out; gate, up: 16 in, 24 out; down: 24 in, 16 out; each to 6 and 6, twice two layers
    projected = 6 * ((16 + 16) + 2 * (16 + 8) + (16 + 16) + 3 * (16 + 24)) + 7 * 36
    padded = extra / (2 * 2 * projected)
    assert padded == int(padded)
    assert sum(len(row.input_ids) for row in POOL) <= padded < 2 * sum(len(row.input_ids) for row in POOL)


def test_a_resumed_stage_keeps_its_features_and_second_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MOST_ROWS", 5)
    setting = make_setting(tmp_path, checkpoint=True)
    scorer = {"method": "trak", "dimensions": 64, "store_bits": 4}
    whole, _ = setting.score("whole", scorer=scorer)
    setting.score("cut", scorer=scorer)
    first, *kept, last = sorted((tmp_path / "cut" / "scratch" / "shards" / "full").iterdir())
    assert kept
    last.unlink()
    first.write_bytes(first.read_bytes()[:100])
    again, summary = setting.score("cut", scorer=scorer)
    for output in ("scores", "features"):
        assert again.artifact(output).ref.digest == whole.artifact(output).ref.digest
    assert summary.measured["shards_kept_from_before"] == len(kept)


class Squared(FeatureScorer):
    """First the row's number, then the mean of all features times its own, over that number."""

    second_pass = True

    def gather(self, features: Iterable[np.ndarray], state: float) -> float:
        return state * float(np.mean(np.concatenate(list(features))))

    def rescore(self, feature_BK: np.ndarray, first_BJ: np.ndarray, gathered: float) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.concatenate([feature_BK * gathered, feature_BK / first_BJ], axis=1)


def test_a_second_pass_replaces_scores_and_says_where_they_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.gradients.stored.ROWS_AT_ONCE", 2)
    quantiser = Quantiser(1, 32)
    code, scale = quantiser.encode(np.array([[1.0], [2.0], [3.0], [6.0]]))
    kept = [Feature(32, 1, float(s), c.tobytes()) for c, s in zip(code, scale, strict=True)]
    first = [2.0, 0.0, 4.0, 3.0]
    good = [Outcome(np.array([x], np.float32), 1.0, feature=f) for x, f in zip(first, kept, strict=True)]
    outcomes = [good[0], Outcome(np.zeros(0, np.float32), np.nan, "score_failed", "why"), *good[1:]]
    about = {"example_id": list("abcde"), "source": ["s"] * 5, "n_tokens": [3] * 5, "n_answer_tokens": [1] * 5}
    folder, part = ShardFolder(tmp_path, "max"), pa.table(about)
    folder.write(0, part, outcomes, flops=1, tokens=2, taken=0)
    folder.keep(0)
    shard = folder.read(0, part.column("example_id"))
    assert shard is not None
    mean = gathered(Squared(), [shard.table, shard.table], 10.0)
    assert mean == 30.0
    found = rescored(Squared(), shard.table, mean, "max").to_pylist()
    assert [row["group_scores"] for row in found] == [[30.0, 0.5], [], [], [90.0, 0.75], [180.0, 2.0]]
    assert [row["score"] for row in found] == [30.0, None, None, 90.0, 180.0]
    assert [row["reason"] for row in found] == ["", "score_failed", "score_not_finite", "", ""]
    assert [row["exact"] for row in found] == [True, False, False, True, True]
    assert features.stored(shard.table).column("example_id").to_pylist() == list("acde")


@pytest.mark.parametrize("method", ["less", "trak"])
def test_a_target_without_rows_or_answers_is_refused(tmp_path: Path, method: str) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    empty = odd_row("y1", [3, 4, 5], [True, False, False])
    for rows, said in (([], "at least one row"), ([empty], "no supervised token, the first is y1")):
        setting.inputs["target_tokens"] = tokens_of(tmp_path / f"t{len(rows)}", rows)
        with pytest.raises(InputError, match=said):
            setting.score(f"r{len(rows)}", scorer={"method": method, "dimensions": 64})
