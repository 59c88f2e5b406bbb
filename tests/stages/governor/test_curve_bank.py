"""The bank of shapes on curves whose continuation is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.optimize import nnls

from data_contracts.cost import Budget
from data_contracts.method import resolve
from stages.governor.curve_bank import BANK, _grid, _solve, effective_tokens, fit_curve
from stages.governor.policy import BETWEEN, INSIDE, Policy
from stages.governor.state import State

X = np.linspace(1e12, 2e13, 20)


@pytest.mark.parametrize("name", BANK)
def test_every_shape_falls(name):
    shape = BANK[name]
    phi_PT = shape.at(np.linspace(0.01, 5, 50), _grid(np.array(shape.low_K), np.array(shape.high_K)))
    assert np.isfinite(phi_PT).all()
    assert (np.diff(phi_PT, axis=0) <= 1e-15).all()


def test_floor_and_size_are_those_of_non_negative_least_squares():
    rng = np.random.default_rng(0)
    cells = [(shape, _grid(np.array(shape.low_K), np.array(shape.high_K))) for shape in BANK.values()]
    phi_TP = np.concatenate([shape.at(np.linspace(0.1, 1, 9), cell) for shape, cell in cells], axis=1).T
    weight_P = rng.uniform(0.2, 1, 9)
    y_PB = np.stack([3 + rng.normal(size=9), np.linspace(1, 4, 9), np.linspace(1, 0, 9) ** 3], axis=1)
    floor_TB, size_TB, rss_TB = _solve(phi_TP, y_PB, weight_P)
    for t in range(0, len(phi_TP), 7):
        for b in range(3):
            root = np.sqrt(weight_P)
            solved, norm = nnls(np.stack([root, root * phi_TP[t]], axis=1), root * y_PB[:, b])
            assert rss_TB[t, b] == pytest.approx(norm**2, rel=1e-6, abs=1e-9)
            if phi_TP[t].std() > 1e-3:
                assert (floor_TB[t, b], size_TB[t, b]) == pytest.approx(solved, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "truth",
    [
        lambda x: 2 + 0.5 * x**-0.5,
        lambda x: 2 + 0.5 * (x + 0.15) ** -0.6,
        lambda x: 1.5 + 1.2 * np.exp(-8 * x),
        lambda x: 2.0 / (1 + (5 * x) ** 0.75) + 1,
    ],
)
def test_the_band_of_80_in_100_holds_the_true_gain_about_as_often(truth):
    """The first half of a planted curve is seen with noise of 2 millinats, the gain of the second half is told."""
    held, errors, true = [], [], float(truth(1.0) - truth(2.0))
    for seed in range(30):
        noise = 0.002 * np.random.default_rng(seed).standard_normal(20)
        fitted = fit_curve(X, truth(X / 2e13) + noise, np.random.default_rng(0))
        middle, low, high = fitted.gain(2e13, 4e13, 0.8)
        held.append(low <= true <= high)
        errors.append(middle - true)
        assert sum(fitted.weights.values()) == pytest.approx(1)
    assert 0.55 <= np.mean(held) <= 1.0  # P(fewer than 17 of 30) at 0.8: 0.3 %
    assert abs(np.mean(errors)) < 0.01


def test_the_parametric_fit_alone_continues_a_power_law_exactly():
    truth = 2 + 0.5 * (X / 2e13) ** -0.37
    fitted = fit_curve(X, truth, np.random.default_rng(0), shapes=("pow3",))
    assert fitted.loss(8e13) == pytest.approx(2 + 0.5 * 4**-0.37, rel=1e-4)


def test_wild_evaluations_hardly_move_the_forecast():
    truth = 2 + 0.5 * (X / 2e13) ** -0.5 + 0.001 * np.random.default_rng(1).standard_normal(20)
    wild = truth.copy()
    wild[[5, 12]] += 0.5
    clean, spoilt = (fit_curve(X, y, np.random.default_rng(0)).gain(2e13, 4e13)[0] for y in (truth, wild))
    assert spoilt == pytest.approx(clean, abs=0.05)


def test_a_rising_curve_is_fitted_flat_and_promises_nothing():
    fitted = fit_curve(X, np.linspace(2, 3, 20), np.random.default_rng(0))
    assert fitted.gain(2e13, 4e13)[0] == pytest.approx(0, abs=1e-5)


def test_too_few_evaluations_have_no_fit():
    assert fit_curve([0, 1, 2, 3], [3, 2, 1, 1], np.random.default_rng(0)) is None


def test_repeated_tokens_count_less_than_fresh_ones_and_never_more_than_the_law_allows():
    worth = effective_tokens([0, 50, 100, 400, 1e9], 100)
    assert worth[:3] == pytest.approx([0, 50, 100])
    assert 350 < worth[3] < 400  # four passes are nearly fresh
    assert worth[4] == pytest.approx(100 * (1 + 15.387756))


def rows(losses, se=0.002):
    return [
        {"step": i, "flops": i * 10**12, "tokens": i * 100, "validation_loss": float(y), "validation_se": se}
        for i, y in enumerate(losses, start=1)
    ]


def decide(losses, allowed=INSIDE, horizon=20, remaining=None, **settings):
    state = State.from_rows([rows(losses)], horizon=horizon * 10**12)
    policy = resolve(Policy, {"method": "gain_left", **settings}, "govern.policy")
    choice = policy.decide(state, Budget(flops=remaining), allowed)
    json.dumps(choice.numbers, allow_nan=False)
    return choice


def test_the_policy_goes_on_while_much_is_left_and_ends_when_little_is():
    noise = 0.001 * np.random.default_rng(2).standard_normal(20)
    n = np.arange(1, 21)
    assert decide(3 + n**-0.5 + noise).action == "continue"
    flat = decide(3 + np.exp(-n) + noise)
    assert flat.action == "end"
    assert flat.numbers["gain_left_high"] < 0.01
    assert decide(3 + np.exp(-n) + noise, allowed=BETWEEN - {"reselect"}, remaining=10**13).action == "anneal"
    assert decide(3 + 0.1 * n**-0.5, horizon=1, min_gain_nats=0.05).action == "end"


def test_the_policy_ends_a_rise_and_waits_for_evaluations():
    assert decide([3, 2.5, 2.2, 2.3, 2.4, 2.5]).reason.startswith("validation loss rises")
    assert decide([3, 2.5, 2.2]).action == "continue"


def test_data_that_repeat_promise_less_than_fresh_data():
    losses = 3 + np.arange(1, 21) ** -0.5
    fresh, again = decide(losses, horizon=400), decide(losses, horizon=400, unique_tokens=40)
    assert again.numbers["gain_left"] < 0.5 * fresh.numbers["gain_left"]


def between(*segments, reselect=1):
    actions = ("warmup", *["reselect"] * (len(segments) - 1))
    state = State.from_rows(
        [rows(part) for part in segments], actions=actions, horizon=8 * 10**12, reselect_flops=reselect * 10**12
    )
    return resolve(Policy, {"method": "gain_left"}, "p").decide(state, Budget(flops=10**14), BETWEEN)


def test_between_rounds_data_are_chosen_anew_while_that_has_paid_and_not_once_it_has_not():
    flat = [2.4, 2.201, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2]
    assert between([3.0, 2.8]).action == "reselect"  # the warm-up
    paid = between([3.0, 2.8], flat)
    assert (paid.action, paid.numbers["reselect_expected_nats"]) == ("reselect", pytest.approx(0.5 * 0.6))
    assert between([3.0, 2.8], flat, [2.2] * 8).action == "anneal"


def test_after_a_rise_a_segment_that_gained_is_annealed_and_one_that_never_did_stops_the_run():
    allowed = BETWEEN - {"reselect"}

    def after(losses):
        state = State.from_rows([rows([3.0, 2.8]), rows(losses)], actions=("warmup", "reselect"), horizon=10**13)
        return resolve(Policy, {"method": "gain_left"}, "p").decide(state, Budget(flops=10**14), allowed)

    assert after([2.7, 2.5, 2.6, 2.7, 2.8]).action == "anneal"
    worse = after([2.9, 3.0, 3.1, 3.2, 3.3])
    assert worse.action == "stop"
    assert worse.numbers["rise_nats"] == pytest.approx(0.5)
