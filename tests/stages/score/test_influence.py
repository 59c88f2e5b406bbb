"""The influence scorer inside its stage, against explicit gradients of the loaded checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data_contracts.errors import InputError
from stages.model.checkpoint import load_checkpoint
from stages.stage import Artifact
from tests.stages.gradients.small_models import rows_of
from tests.stages.gradients.test_inner_product import explicit_gradient
from tests.stages.score.setting import ADAM, Setting, checkpoint_of, make_setting, odd_row, tokens_of


def explicit_influence(
    setting: Setting, groups: list[list[int]], per: str = "visit", checkpoint: Artifact | None = None
) -> np.ndarray:
    """Return score_NJ in float64, one example at a time."""
    folder = (checkpoint or setting.inputs["checkpoint"]).folder
    trained = load_checkpoint(folder, setting.pin, dtype=torch.float64)
    pool, target = rows_of(24, seed=1), rows_of(6, seed=2)
    own = [explicit_gradient(trained.model, row) for row in pool]
    goal = [explicit_gradient(trained.model, row) for row in target]
    result = np.zeros((len(pool), len(groups)))
    for column, members in enumerate(groups):
        for name in own[0][0]:
            mean = sum(goal[item][0][name] / goal[item][2] for item in members) / len(members)
            root = torch.sqrt(trained.moments[name][1].double() / (1 - ADAM["beta2"] ** 4)) + ADAM["epsilon"]
            for row, (gradient, _, tokens) in enumerate(own):
                unit = tokens if per == "token" else 1
                result[row, column] += float((gradient[name] / unit * mean / root).sum())
    return result


@pytest.mark.parametrize("per", ["visit", "token"])
def test_influence_of_a_checkpoint_equals_the_explicit_product(tmp_path: Path, per: str) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    found = setting.scores(scorer={"method": "influence", "per": per}, batch_tokens=64)
    expected = explicit_influence(setting, [list(range(6))], per)[:, 0]
    scores = np.array([row["score"] for row in found.values()])
    assert list(found) == sorted(found)
    np.testing.assert_allclose(scores, expected, atol=2e-4 * np.abs(expected).max())
    losses = [row["loss"] for row in found.values()]
    model = load_checkpoint(setting.inputs["checkpoint"].folder, setting.pin).model
    explicit = [explicit_gradient(model, row) for row in rows_of(24, seed=1)]
    np.testing.assert_allclose(losses, [loss / tokens for _, loss, tokens in explicit], rtol=1e-5)
    assert all(row["exact"] for row in found.values())


@pytest.mark.parametrize("combine", ["mean", "max"])
def test_groups_by_source_give_a_column_each_and_are_combined(tmp_path: Path, combine: str) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    work, summary = setting.score(scorer={"method": "influence"}, groups="source", combine=combine)
    expected = explicit_influence(setting, [[1, 3, 4], [0, 2, 5]])  # sources a, b
    rows = work.rows("scores")
    found = np.array([row["group_scores"] for row in rows])
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
    one = found.max(axis=1) if combine == "max" else found.mean(axis=1)
    np.testing.assert_allclose([row["score"] for row in rows], one, rtol=1e-5, atol=1e-6)
    assert summary.facts["target_groups"] == "a, b"


def test_several_checkpoints_are_weighted_by_their_learning_rates(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    first = checkpoint_of(tmp_path / "first", setting.pin, seed=3, learning_rate=1e-4)
    last = checkpoint_of(tmp_path / "last", setting.pin, seed=4, learning_rate=4e-4)
    setting.inputs["checkpoint"] = [first, last]  # type: ignore[assignment]
    work, summary = setting.score(scorer={"method": "influence"}, groups="source")
    one, two = (explicit_influence(setting, [[1, 3, 4], [0, 2, 5]], checkpoint=item) for item in (first, last))
    expected = 0.2 * one + 0.8 * two
    found = np.array([row["group_scores"] for row in work.rows("scores")])
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
    single = make_setting(tmp_path / "single", checkpoint=True)
    alone, _ = single.score(scorer={"method": "influence"}, groups="source")
    assert work.ledger().total.flops == 2 * alone.ledger().total.flops
    assert summary.facts["form"] == "backward"


def test_a_step_on_the_best_example_lowers_the_target_loss_most(tmp_path: Path) -> None:
    """The sign, by finite difference: move the weights along −D∇ of the best and of the worst example."""
    setting = make_setting(tmp_path, checkpoint=True)
    found = setting.scores(scorer={"method": "influence"})
    order = sorted(found, key=lambda example_id: found[example_id]["score"])
    pool = {row.example_id: row for row in rows_of(24, seed=1)}

    def target_loss_after(example_id: str | None) -> float:
        trained = load_checkpoint(setting.inputs["checkpoint"].folder, setting.pin, dtype=torch.float64)
        if example_id is not None:
            gradient, _, _ = explicit_gradient(trained.model, pool[example_id])
            with torch.no_grad():
                for name, parameter in trained.model.named_parameters():
                    root = torch.sqrt(trained.moments[name][1].double() / (1 - ADAM["beta2"] ** 4)) + ADAM["epsilon"]
                    parameter.sub_(1e-7 * gradient[name] / root)
        return sum(loss / n for _, loss, n in (explicit_gradient(trained.model, row) for row in rows_of(6, seed=2)))

    before = target_loss_after(None)
    assert target_loss_after(order[-1]) < before
    assert target_loss_after(order[0]) - before == pytest.approx(-6e-7 * found[order[0]]["score"], rel=0.02)


def test_without_a_checkpoint_gradients_are_compared_as_they_are_and_it_says_so(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    work, _ = setting.score(scorer={"method": "influence"})
    assert [text for text in work.notices if "no checkpoint with Adam moments" in text]
    assert all(row["score"] is not None for row in work.rows("scores"))


def test_scores_do_not_depend_on_batch_size(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    one = setting.scores("one", scorer={"method": "influence"}, batch_tokens=1)
    many = setting.scores("many", scorer={"method": "influence"}, batch_tokens=4096)
    left, right = (np.array([row["score"] for row in found.values()]) for found in (one, many))
    np.testing.assert_allclose(left, right, atol=1e-5 * np.abs(left).max())


def test_flops_are_those_of_one_training_pass_over_target_and_pool(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    work, summary = setting.score(scorer={"method": "influence"}, batch_tokens=1)  # a row a batch: no padding
    rows = rows_of(24, seed=1) + rows_of(6, seed=2)
    trained = load_checkpoint(setting.inputs["checkpoint"].folder, setting.pin)
    layers = sum(p.numel() for n, p in trained.model.named_parameters() if "layers" in n and p.dim() == 2)
    head = trained.model.lm_head.weight.numel()
    expected = 0
    for row in rows:
        length, answers = len(row.input_ids), int(row.answer_mask[1:].sum())
        # forward + two backward products for each weight, and attention: QKᵀ and AV forward (2 products of T²·d each),
        # and in the backward 5 products (scores again, dV, dA, dQ, dK); d = 16, 2 layers.
        expected += 6 * length * layers + 6 * answers * head + 2 * (2 + 5) * 2 * length * length * 16
    cost = work.ledger().by_cause()["score"]
    assert cost.flops == expected == summary.measured["flops"]
    assert cost.tokens == sum(len(row.input_ids) for row in rows)


def test_a_target_row_without_a_supervised_token_is_refused(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    empty = odd_row("y1", [3, 4, 5], [True, False, False])  # only its first token, which nothing predicts
    setting.inputs["target_tokens"] = tokens_of(tmp_path / "empty", [empty])
    with pytest.raises(InputError, match="no supervised token, the first is y1"):
        setting.score(scorer={"method": "influence"})


def test_an_empty_target_is_refused(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    setting.inputs["target_tokens"] = tokens_of(tmp_path / "none", [])
    with pytest.raises(InputError, match="at least one row"):
        setting.score(scorer={"method": "influence"})
