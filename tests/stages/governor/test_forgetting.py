"""Forgetting: when the loss on a retention set ends a run, against closed forms of planted losses."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import norm

from data_contracts.cost import Budget, Cost
from data_contracts.method import names
from stages.govern.plain import replay
from stages.governor.policy import BETWEEN, INSIDE, Policy, forgetting
from stages.governor.sharing import curve_of
from stages.governor.state import Retention, State
from stages.train.policy import ask
from tests.stages.governor.test_policies import FLOPS, segment

SETTINGS = {"asha": {"grace_flops": 1}}


def watched(rises, *, began=2.0, losses=None, **errors):
    """Return rows of a segment whose retention loss lies `rises` above `began`, and whose validation loss falls."""
    rows = segment(losses or [3.0 - 0.1 * number for number in range(len(rises))])
    more = {"retention_se": 0.5, "retention_rise_se": 0.01} | errors
    return [{**row, "retention_loss": began + rise, **more} for row, rise in zip(rows, rises, strict=True)]


def ends(rises, allowed, **errors):
    state = State.from_rows([watched(rises, **errors)], most_forgotten=allowed)
    return forgetting(state, INSIDE)


def test_it_ends_at_the_first_evaluation_above_what_is_allowed_beyond_error_and_says_the_numbers():
    slope, allowed, error = 0.013, 0.05, 0.01
    rises = [slope * number for number in range(20)]
    first = next(n for n in range(20) if ends(rises[: n + 1], allowed, retention_rise_se=error))
    assert first == math.floor((allowed + norm.ppf(0.95) * error) / slope) + 1 == 6
    choice = ends(rises[: first + 1], allowed, retention_rise_se=error)
    assert choice.action == "end"
    for number in ("0.078", "0.01", "from 2,", "0.05 allowed"):
        assert number in choice.reason
    told = {name: choice.numbers[name] for name in ("retention_began", "retention_loss", "most_forgotten_nats")}
    assert told == {"retention_began": 2.0, "retention_loss": pytest.approx(2.078), "most_forgotten_nats": 0.05}
    assert choice.numbers["retention_rise"] == pytest.approx(0.078)
    assert choice.numbers["retention_rise_se"] == error
    between = State.from_rows([watched(rises)], most_forgotten=allowed)
    assert forgetting(between, BETWEEN).action == "stop"


@pytest.mark.parametrize(
    ("beyond", "wanted"), [(0.0, 0.05), (2.0, norm.cdf(2 - norm.ppf(0.95))), (-2.0, norm.cdf(-2 - norm.ppf(0.95)))]
)
def test_noise_ends_it_as_often_as_a_one_sided_test_of_5_percent_would(beyond, wanted):
    draws, error, allowed = 4000, 0.02, 0.1
    seen = allowed + error * (beyond + np.random.default_rng(0).standard_normal(draws))
    ended = sum(ends([0.0, rise], allowed, retention_rise_se=error) is not None for rise in seen)
    assert ended / draws == pytest.approx(wanted, abs=3 * math.sqrt(wanted * (1 - wanted) / draws))


def test_without_the_error_of_the_paired_difference_both_errors_count():
    rise, se = 0.05, 0.03
    independent = math.hypot(se, se)
    assert not ends([0.0, rise], 0.0, retention_se=se, retention_rise_se=None)
    assert ends([0.0, norm.ppf(0.95) * independent + 1e-6], 0.0, retention_se=se, retention_rise_se=None)
    assert not ends([0.0, norm.ppf(0.95) * independent - 1e-6], 0.0, retention_se=se, retention_rise_se=None)
    assert ends([0.0, rise], 0.0, retention_se=se, retention_rise_se=0.01)


def test_a_retention_loss_that_is_not_finite_is_forgotten_and_an_unset_limit_ends_nothing():
    assert ends([0.0, math.nan], 0.5).numbers["retention_rise"] is None
    assert ends([0.0, math.inf], 0.5)
    assert not ends([0.0, math.nan, 9.0], None)
    state = State.from_rows([watched([0.0, 9.0])])
    assert (state.best.loss, state.retention) == (2.9, Retention(2.0, 0.5, None))


def test_the_best_is_the_lowest_of_those_that_have_not_forgotten():
    rows = watched([0.0, 0.1, 0.2, 0.02], losses=[3.0, 2.5, 1.0, 2.6])
    assert State.from_rows([rows], most_forgotten=0.05).best.loss == 2.6
    assert State.from_rows([rows], most_forgotten=0.09).best.loss == 2.5  # 0.1 is not beyond 0.09 and its error
    assert State.from_rows([rows]).best.loss == 1.0
    assert State.from_rows([rows[1:]], retention=Retention(1.0, None, 0.0)).best is None


@pytest.mark.parametrize("name", names(Policy))
def test_no_policy_passes_over_it_inside_training_in_a_decay_or_on_a_file(tmp_path, name):
    rows = watched([0.0, 0.02, 0.3])
    asked = {
        "start": None,
        "remaining": Budget(flops=10**20),
        "spent": Cost(flops=1),
        "rest_flops": FLOPS,
        "metric": "validation_loss",
        "direction": "minimise",
    }
    settings = {"method": name, **SETTINGS.get(name, {})}
    for annealing in (False, True):
        for allowed, action in ((0.1, "end"), (0.5, "continue"), (None, "continue")):
            kept = Retention(2.0, 0.5, allowed)
            assert ask(settings, rows, annealing=annealing, retention=kept, **asked).action == action
    file = tmp_path / "evals.jsonl"
    file.write_text("".join(json.dumps({**row, "eval_loss": row["validation_loss"]}) + "\n" for row in rows))
    assert replay(file, settings, most_forgotten=0.1).stopped_at == 30
    assert replay(file, settings, most_forgotten=0.1).best_step == 20
    assert replay(file, settings).stopped_at is None


def test_a_run_that_has_forgotten_too_much_gets_no_part_of_what_is_shared():
    rises = [0.0] * 7 + [0.3]
    curve, why, over = curve_of(State.from_rows([watched(rises)], most_forgotten=0.1))
    assert (curve, over) == (None, True)
    assert "forgotten" in why
    assert curve_of(State.from_rows([watched(rises)]))[0] is not None
