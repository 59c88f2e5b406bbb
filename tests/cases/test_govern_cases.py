"""G01 and G02: evaluations that misled other stoppers, fed to ours."""

from __future__ import annotations

import pytest

from data_contracts.config import GovernConfig
from data_contracts.errors import ConfigError, InputError
from stages.govern.plain import replay

pytestmark = pytest.mark.shared
PATIENCE = {"method": "patience", "patience": 2}


def case(shared, name):
    return shared / "cases" / "files" / name / "evals.jsonl"


def test_G01_a_loss_that_is_not_finite_never_counts_as_better(shared):
    path = case(shared, "G01-nan-counts-as-better")
    report = replay(path, PATIENCE)
    assert (report.best_step, report.best_value) == (20, 0.8)
    assert report.stopped_at == 40
    assert report.non_finite_steps == (30, 40)
    assert "30, 40" in report.reason
    assert not any("step 50" in line for line in report.log)


def test_G01_the_marginal_gain_rule_stops_at_the_first_loss_that_is_not_finite(shared):
    report = replay(case(shared, "G01-nan-counts-as-better"), {"method": "marginal_gain"})
    assert (report.best_step, report.best_value, report.stopped_at) == (20, 0.8, 30)
    assert "not finite at step 30" in report.reason


def test_G02_a_loss_with_a_data_set_in_its_name_is_minimised(shared):
    report = replay(case(shared, "G02-best-picked-the-wrong-way"), PATIENCE, "eval_target_loss")
    assert report.direction == "minimise"
    assert (report.best_step, report.best_value, report.stopped_at) == (30, 1.2, None)
    assert "minimise" in report.log[0]


def test_G02_an_uncertain_name_is_refused_before_training(shared):
    path = case(shared, "G02-best-picked-the-wrong-way")
    with pytest.raises(ConfigError, match="eval_quality"):
        replay(path, PATIENCE, "eval_quality")
    with pytest.raises(ConfigError, match="eval_quality"):
        GovernConfig(metric="eval_quality")
    report = replay(path, PATIENCE, "eval_quality", "maximise")
    assert (report.direction, report.best_step, report.best_value) == ("maximise", 20, 0.7)


@pytest.mark.parametrize(
    "name", ["loss", "eval_loss", "val/perplexity", "word-error", "f1[macro]", "exact_match,none", "acc"]
)
def test_G02_certain_names_need_no_direction(name):
    assert GovernConfig(metric=name).direction is None


@pytest.mark.parametrize("name", ["quality", "loss_reduction", "error_free", "score", "", "lossless"])
def test_G02_other_names_do(name):
    with pytest.raises(ConfigError):
        GovernConfig(metric=name)


def test_a_file_that_is_not_there_or_is_no_text_is_named(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("nofile", "bytes"):
        with pytest.raises(InputError, match=name):
            replay(tmp_path / name, PATIENCE)
