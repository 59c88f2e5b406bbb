"""Forward-only influence against explicit float64 gradients, and against the direct form on a real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from data_contracts.config import ModelConfig
from stages.gradients import differences
from stages.gradients.differences import Differences
from stages.model.batch import collate
from stages.model.checkpoint import load_checkpoint
from stages.model.load import pin_model
from stages.score.methods import influence
from tests.stages.gradients.small_models import VOCABULARY, rows_of, tiny_llama
from tests.stages.gradients.test_inner_product import explicit_gradient
from tests.stages.score.setting import Setting, checkpoint_of, make_setting, odd_row, record_of, tokens_of
from tests.stages.score.test_influence import explicit_influence
from tests.stages.score.test_real_model import bfloat16_plan, questions

FORWARD = {"method": "influence_forward"}


@pytest.mark.parametrize("per", ["visit", "token"])
def test_it_equals_the_explicit_product_in_float64(tmp_path: Path, per: str) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    work, summary = setting.score(scorer={**FORWARD, "per": per}, batch_tokens=64)
    expected = explicit_influence(setting, [list(range(6))], per)[:, 0]
    rows = work.rows("scores")
    found = np.array([row["score"] for row in rows])
    np.testing.assert_allclose(found, expected, atol=0.01 * np.abs(expected).max())
    assert spearmanr(found, expected).statistic > 0.995
    assert float(summary.facts["step_error"]) < 0.01
    model = load_checkpoint(setting.inputs["checkpoint"].folder, setting.pin).model
    explicit = [explicit_gradient(model, row) for row in rows_of(24, seed=1)]
    np.testing.assert_allclose([row["loss"] for row in rows], [loss / n for _, loss, n in explicit], rtol=1e-4)


@pytest.mark.parametrize("difference", ["central", "one_sided"])
def test_every_group_has_its_own_column_and_step(tmp_path: Path, difference: str) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    work, summary = setting.score(scorer={**FORWARD, "difference": difference}, groups="source")
    expected = explicit_influence(setting, [[1, 3, 4], [0, 2, 5]])  # sources a, b
    found = np.array([row["group_scores"] for row in work.rows("scores")])
    for column in range(2):
        assert spearmanr(found[:, column], expected[:, column]).statistic > 0.99
    assert len(str(summary.facts["step"]).split(", ")) == 2


def test_its_error_is_of_second_order_and_of_first_order_where_one_sided() -> None:
    """In float64, where rounding is far away: halving the step divides the error by four, or by two."""
    model, rows = tiny_llama(), rows_of(5, seed=4)
    torch.manual_seed(0)
    direction = {name: torch.randn(1, *value.shape).double() for name, value in model.named_parameters()}
    explicit = [explicit_gradient(model, row)[0] for row in rows]
    exact = torch.tensor([sum(float((g[n] * d[0]).sum()) for n, d in direction.items()) for g in explicit])
    for central, ratio in ((True, 4.0), (False, 2.0)):
        differences = Differences(model, direction, None, central=central)
        errors = []
        for step in (2e-3, 1e-3):
            differences.step_J = [step]
            errors.append(float((differences.of(collate(rows))[0][:, 0] - exact).norm()))
        assert errors[0] / errors[1] == pytest.approx(ratio, rel=0.1)


def test_every_weight_comes_back_bit_for_bit_even_when_a_batch_fails() -> None:
    model = tiny_llama(exact=False).float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    direction = {name: torch.randn(3, *value.shape) * 1e4 for name, value in model.named_parameters()}
    differences = Differences(model, direction, None, central=True)
    differences.step_J = [1e-2] * 3
    for seed in range(5):
        differences.of(collate(rows_of(3, seed=seed)))
    with pytest.raises(IndexError):
        differences.of(collate([odd_row("bad", [1, VOCABULARY + 3, 2], [False, True, True])]))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("difference", "passes"), [("central", 4), ("one_sided", 3)])
def test_two_groups_are_charged_four_forward_passes_or_three(tmp_path: Path, difference: str, passes: int) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    settings = {"scorer": {**FORWARD, "difference": difference, "calibration_rows": 1}, "groups": "source"}
    once, _ = setting.score("once", **settings)
    one_pass, _ = setting.score("perplexity", scorer={"method": "perplexity"})
    again = [odd_row(f"z{row.example_id}", row.input_ids, row.answer_mask) for row in rows_of(24, seed=1)]
    setting.inputs["pool_tokens"] = tokens_of(tmp_path / "again", [*rows_of(24, seed=1), *again])
    twice, _ = setting.score("twice", **settings)
    pool = one_pass.ledger().total
    assert pool.flops > 0
    more = twice.ledger().total
    # tokens are exact; operations of the second half of the pool depend a little on how it is padded
    assert more.tokens - once.ledger().total.tokens == passes * pool.tokens
    assert more.flops - once.ledger().total.flops == pytest.approx(passes * pool.flops, rel=0.1)


@pytest.mark.shared
def test_on_a_real_model_it_ranks_as_direct_influence_does(shared: Path, tmp_path: Path) -> None:
    pin = pin_model(ModelConfig(path="stories260k"), shared / "data")
    pool, target = questions(shared, pin, 64), questions(shared, pin, 12, start=200)
    setting = Setting(
        tmp_path,
        pin,
        {
            "base": record_of(tmp_path / "base", "base", pin),
            "checkpoint": checkpoint_of(tmp_path / "checkpoint", pin),
            "pool_tokens": tokens_of(tmp_path / "pool", pool),
            "target_tokens": tokens_of(tmp_path / "target", target, ["a", "b"] * 6),
        },
    )
    direct, _ = setting.score("direct", scorer={"method": "influence"}, groups="source")
    exact = np.array([row["group_scores"] for row in direct.rows("scores")])
    for difference in ("central", "one_sided"):
        scorer = {**FORWARD, "difference": difference, "calibration_rows": 6}
        work, summary = setting.score(difference, scorer=scorer, groups="source")
        found = np.array([row["group_scores"] for row in work.rows("scores")])
        assert min(spearmanr(found[:, j], exact[:, j]).statistic for j in range(2)) > 0.99
        assert max(float(error) for error in str(summary.facts["step_error"]).split(", ")) < 0.02


def test_its_measured_error_foretells_that_of_the_pool(tmp_path: Path) -> None:
    """In float32 and in bfloat16, whose 8 bits ask for a longer step: the error stated is that of the pool's scores."""
    setting = make_setting(tmp_path, checkpoint=True)
    steps, stated = [], []
    for precision in ("float32", "bfloat16"):
        if precision == "bfloat16":
            setting.inputs["plan"] = record_of(tmp_path / "plan", "plan", bfloat16_plan())
        direct = setting.scores(f"direct {precision}", scorer={"method": "influence"})
        exact = np.array([row["score"] for row in direct.values()])
        work, summary = setting.score(precision, scorer=FORWARD)
        found = np.array([row["score"] for row in work.rows("scores")])
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        steps.append(float(summary.facts["step"]))
        stated.append(float(summary.facts["step_error"]))
        assert error / 4 < stated[-1] < 4 * error
    assert steps[1] > steps[0]
    assert stated[1] > 3 * stated[0]


def test_a_step_that_drowns_in_rounding_is_told_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    fine, _ = setting.score("fine", scorer=FORWARD)
    monkeypatch.setattr(differences, "STEPS", (1e-9,))
    drowned, summary = setting.score("drowned", scorer=FORWARD)
    assert not [text for text in fine.notices if "use `influence`" in text]
    assert [text for text in drowned.notices if "use `influence`" in text]
    assert float(summary.facts["step_error"]) > 0.1


def of_pool(setting: Setting, name: str, rows: int, **settings: object) -> tuple[np.ndarray, dict[str, object]]:
    setting.inputs["pool_tokens"] = tokens_of(setting.folder / f"pool-{rows}", rows_of(rows, seed=7))
    work, summary = setting.score(name, **settings)
    return np.array([row["score"] for row in work.rows("scores")]), dict(summary.facts)


def test_influence_takes_the_forward_form_where_it_pays_and_is_seen_to_be_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    exact, facts = of_pool(setting, "exact", 256, scorer={"method": "influence", "form": "backward"})
    assert facts["form"] == "backward"
    forward, facts = of_pool(setting, "auto", 256, scorer={"method": "influence"})
    assert facts["form"] == "forward"
    assert float(str(facts["step_error"])) <= influence.FORWARD_ERROR
    assert not np.array_equal(exact, forward)
    assert spearmanr(exact, forward).statistic > 0.999
    monkeypatch.setattr(influence, "FORWARD_ERROR", 1e-12)
    kept, facts = of_pool(setting, "poor", 256, scorer={"method": "influence"})
    assert facts["form"] == "backward"
    np.testing.assert_array_equal(kept, exact)


@pytest.mark.parametrize(("rows", "settings"), [(255, {}), (256, {"groups": "source"})])
def test_influence_stays_with_the_backward_form_for_a_small_pool_and_for_several_groups(
    tmp_path: Path, rows: int, settings: dict[str, str]
) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    _, facts = of_pool(setting, "auto", rows, scorer={"method": "influence"}, **settings)
    assert facts["form"] == "backward"
    assert "step_error" not in facts


def test_the_form_that_costs_less_is_charged_less(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    flops = {}
    for form in ("backward", "auto"):
        setting.inputs["pool_tokens"] = tokens_of(tmp_path / f"pool-{form}", rows_of(600, seed=7))
        flops[form] = setting.score(form, scorer={"method": "influence", "form": form})[0].ledger().total.flops
    assert 0.6 < flops["auto"] / flops["backward"] < 0.85


SIZES = {"backward": 10_000, "forward": 6_000}


@pytest.mark.parametrize(
    ("allowed", "settings", "groups", "form"),
    [
        (9_999, {}, "all", "forward"),
        (10_000, {}, "all", "backward"),
        (None, {}, "all", "backward"),
        (10_003, {}, "source", "forward"),  # a second group's direction of one number takes four bytes more
        (10_004, {}, "source", "backward"),
        (9_999, {"form": "backward"}, "all", "backward"),
        (9_999, {"store_bits": 8}, "all", "backward"),
    ],
)
def test_influence_takes_the_forward_form_where_the_plans_memory_has_no_room_for_activations(
    tmp_path: Path, allowed: int | None, settings: dict[str, object], groups: str, form: str
) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    plan = bfloat16_plan().model_copy(
        update={"precision": "float32", "allowed_bytes": allowed, "score_bytes": SIZES, "trainable": 1}
    )
    setting.inputs["plan"] = record_of(tmp_path / "plan", "plan", plan)
    work, summary = setting.score(scorer={"method": "influence", **settings}, groups=groups)
    assert summary.facts["form"] == form
    expected = explicit_influence(setting, [list(range(6))] if groups == "all" else [[1, 3, 4], [0, 2, 5]])
    found = np.array([row["group_scores"] for row in work.rows("scores")])
    np.testing.assert_allclose(found, expected, atol=0.01 * np.abs(expected).max())
    said = [text for text in work.notices if "9,999 are allowed" in text or "10,003 are allowed" in text]
    assert bool(said) == (allowed in (9_999, 10_003))
    assert ("form_for" in summary.facts) == (form == "forward")


def test_where_the_forward_form_needs_as_much_the_backward_form_stays(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, checkpoint=True)
    sizes = {"backward": 10_000, "forward": 10_000}
    plan = bfloat16_plan().model_copy(update={"precision": "float32", "allowed_bytes": 1, "score_bytes": sizes})
    setting.inputs["plan"] = record_of(tmp_path / "plan", "plan", plan)
    assert setting.score(scorer={"method": "influence"})[1].facts["form"] == "backward"


def test_rows_pass_between_scorings_of_one_form_alone() -> None:
    plan = bfloat16_plan().model_copy(update={"allowed_bytes": 9_999, "score_bytes": SIZES})
    regime = influence.Influence.regime
    assert len({regime(9, 1, plan), regime(9, 1, None), regime(256, 1, None), regime(4096, 1, None)}) == 4
