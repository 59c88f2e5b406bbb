"""Policies on synthetic curves whose right decision is known in closed form."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.cost import Budget
from data_contracts.method import resolve
from stages.governor.gain import marginal_gain, rise_since_best
from stages.governor.policy import BETWEEN, INSIDE, Policy
from stages.governor.state import State

FLOPS = 10**12  # between two evaluations


def segment(losses, *, phase="stable", start=0, se=0.01):
    return [
        {
            "step": start + 10 * (i + 1),
            "phase": phase,
            "flops": FLOPS * (i + 1),
            "tokens": 100 * (i + 1),
            "train_loss": 1.0,
            "validation_loss": loss,
            "validation_se": se,
        }
        for i, loss in enumerate(losses)
    ]


def policy(name="marginal_gain", **settings):
    return resolve(Policy, {"method": name, **settings}, "govern.policy")


AMPLE = Budget(flops=100 * FLOPS)


def decide(segments, *, remaining=AMPLE, allowed=BETWEEN, settings=None, **state):
    return policy(**(settings or {})).decide(State.from_rows(segments, **state), remaining, allowed)


WARMUP = segment([4.0, 3.5], phase="warmup")
ACTIONS = ("warmup", "reselect")


def test_the_gain_of_a_straight_curve_is_its_slope():
    state = State.from_rows([segment([3.0, 2.9, 2.8, 2.7])])
    gain = marginal_gain(state, 5, 0.9)
    assert gain.rate == pytest.approx(0.1 / FLOPS)
    assert gain.low == pytest.approx(gain.rate)
    assert gain.high == pytest.approx(gain.rate)


def test_the_robust_gain_is_not_moved_by_a_wild_evaluation():
    state = State.from_rows([segment([3.0, 2.9, 9.0, 2.7, 2.6, 2.5, 2.4, 2.3])])
    assert marginal_gain(state, 8, 0.9, robust=True).rate == pytest.approx(0.1 / FLOPS, rel=0.05)
    assert abs(marginal_gain(state, 8, 0.9).rate - 0.1 / FLOPS) > 0.1 / FLOPS
    assert decide([segment([3.0, 2.9, 9.0, 2.7, 2.6])], allowed=INSIDE, settings={"robust": True}).action == "continue"


def test_a_new_segment_is_fitted_from_the_checkpoint_that_it_started_from():
    state = State.from_rows([WARMUP, segment([3.4, 3.3])])
    gain = marginal_gain(state, 5, 0.9)
    assert gain.points == 3
    assert gain.rate == pytest.approx(0.1 / FLOPS)


def test_flops_add_up_over_segments_that_each_start_at_zero():
    state = State.from_rows([WARMUP, segment([3.0])])
    assert [p.flops for p in state.points] == [FLOPS, 2 * FLOPS, 3 * FLOPS]
    assert state.segment_flops(1) == FLOPS
    assert state.segment_gain(1) == pytest.approx(0.5)


def test_after_the_warm_up_data_are_chosen():
    assert decide([WARMUP], actions=("warmup",)).action == "reselect"


def test_a_used_up_budget_stops_and_says_which_stock():
    choice = decide([WARMUP], remaining=Budget(flops=0, tokens=5))
    assert choice.action == "stop"
    assert "flops" in choice.reason


def test_less_than_the_closing_decay_needs_stops():
    choice = decide([WARMUP], remaining=Budget(flops=int(0.1 * FLOPS)))
    assert (choice.action, "used up" in choice.reason) == ("stop", True)


def test_a_falling_curve_goes_on_when_choosing_anew_costs_too_much():
    choice = decide([WARMUP, segment([3.0, 2.7, 2.4, 2.1])], actions=ACTIONS, reselect_flops=50 * FLOPS)
    assert choice.action == "continue"
    # four evaluations and the start lie on one line up to the first step: slope about 0.34 nats an evaluation
    assert choice.numbers["expected_nats"] == pytest.approx(4 * 0.34, rel=0.01)


def test_a_plateau_after_a_selection_that_paid_chooses_anew():
    choice = decide([WARMUP, segment([2.5, 2.401, 2.4, 2.4, 2.4, 2.4])], actions=ACTIONS, reselect_flops=FLOPS)
    assert choice.action == "reselect"
    assert choice.numbers["reselect_expected_nats"] == pytest.approx(0.5 * (3.5 - 2.4))
    assert choice.numbers["reselect_cost_flops"] == 7 * FLOPS


def test_a_plateau_without_history_anneals():
    flat = segment([3.4999, 3.4998, 3.4999, 3.4998, 3.4999, 3.4998])
    choice = decide([WARMUP, flat], actions=ACTIONS, reselect_flops=FLOPS)
    assert choice.action == "anneal"
    assert choice.numbers["expected_nats_upper"] < 0.005


def test_an_annealed_segment_stops():
    choice = decide([WARMUP, segment([3.0, 2.9], phase="decay")], actions=("warmup", "anneal"))
    assert (choice.action, "annealed" in choice.reason) == ("stop", True)


def test_the_last_affordable_segment_is_annealed():
    state = [WARMUP, segment([3.0, 2.5, 2.0, 1.5])]
    choice = decide(state, remaining=Budget(flops=int(4.2 * FLOPS)), actions=ACTIONS)
    assert choice.action == "anneal"


def test_a_loss_that_rises_beyond_its_error_is_overfit():
    rising = segment([2.5, 2.0, 2.1, 2.2, 2.3])
    assert decide([WARMUP, rising], actions=ACTIONS).action == "stop"
    inside = decide([rising], allowed=INSIDE)
    assert inside.action == "end"
    assert inside.numbers["rise_nats"] == pytest.approx(0.3)
    assert inside.numbers["best_step"] == 20


def test_a_rise_within_its_error_is_not_overfit():
    state = State.from_rows([segment([2.0, 2.01, 2.02], se=0.1)])
    rise = rise_since_best(state)
    z = 0.02 / math.hypot(0.1, 0.1)
    assert rise.p_value == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)))
    assert rise.p_value > 0.4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_and_is_never_the_best(bad):
    choice = decide([segment([2.0, bad])], allowed=INSIDE)
    assert choice.action == "end"
    assert "20" in choice.reason
    assert (choice.numbers["best_step"], choice.numbers["best_loss"]) == (10, 2.0)


def test_a_training_loss_that_is_not_finite_ends():
    rows = segment([2.0, 1.9])
    rows[1]["train_loss"] = math.nan
    assert decide([rows], allowed=INSIDE).action == "end"


def test_decay_inside_training_runs_to_its_end():
    assert decide([segment([2.0, 2.1, 2.3, 2.5], phase="decay")], allowed=INSIDE).action == "continue"


def test_a_segment_ends_early_when_its_rest_cannot_pay():
    flat = segment([2.0, 2.0, 2.0, 2.0, 2.0])
    assert decide([flat], allowed=INSIDE, horizon=FLOPS).action == "end"
    assert decide([segment([2.5, 2.4, 2.3, 2.2])], allowed=INSIDE, horizon=FLOPS).action == "continue"


def test_noise_on_a_productive_curve_rarely_ends_it_and_a_plateau_mostly_does():
    """A curve 3 + 0.5·n^-0.5 and a plateau, noise of 0.0005 nats on each evaluation: the policy tells them apart."""
    rng = np.random.default_rng(5)
    fall = [3 + 0.5 * (i + 1) ** -0.5 for i in range(6)]
    ended = {"fall": 0, "flat": 0}
    for _ in range(200):
        for name, curve in (("fall", fall), ("flat", [3.0] * 6)):
            noisy = [loss + rng.normal(0, 0.0005) for loss in curve]
            ended[name] += decide([segment(noisy)], allowed=INSIDE, horizon=2 * FLOPS).action == "end"
    assert ended["fall"] <= 4
    assert ended["flat"] >= 180


def test_maximised_metrics_are_turned_and_shown_as_they_are():
    rows = [{"step": i, "accuracy": value} for i, value in enumerate([0.2, 0.6, 0.5], start=1)]
    state = State.from_rows([rows], metric="accuracy", direction="maximise")
    assert state.best.step == 2
    assert state.shown(state.best.loss) == 0.6


losses = st.lists(st.floats(0.1, 10) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=8)


@given(
    st.lists(losses, min_size=1, max_size=4),
    st.integers(0, 50 * FLOPS),
    st.sampled_from([BETWEEN, INSIDE, frozenset({"anneal", "stop"}), frozenset({"continue", "end"})]),
    st.sampled_from(["marginal_gain", "patience"]),
)
def test_a_policy_only_returns_what_is_allowed_and_finite_numbers(segments, left, allowed, name):
    rows = [segment(part) for part in segments]
    actions = ("warmup", *["reselect"] * (len(rows) - 1))
    state = State.from_rows(rows, actions=actions, reselect_flops=FLOPS)
    choice = policy(name).decide(state, Budget(flops=left), allowed)
    assert choice.action in allowed
    json.dumps(choice.numbers, allow_nan=False)
    assert choice == policy(name).decide(state, Budget(flops=left), allowed)
    finite = [loss for part in segments for loss in part if math.isfinite(loss)]
    assert choice.numbers["best_loss"] == (min(finite) if finite else None)


@given(losses, st.integers(1, 4))
def test_patience_stops_where_a_direct_count_says(values, patience):
    best, since, expected = math.inf, 0, None
    for i, value in enumerate(values):
        since = 0 if value < best else since + 1
        best = min(best, value) if value < best else best
        if since >= patience:
            expected = i
            break
    rule, seen = policy("patience", patience=patience), None
    for i in range(len(values)):
        state = State.from_rows([segment(values[: i + 1])])
        if rule.decide(state, Budget(), frozenset({"continue", "end"})).action == "end":
            seen = i
            break
    assert seen == expected


@pytest.mark.parametrize(("a", "b"), [(2.0, 0.3), (1.0, 0.5), (3.0, 0.2)])
def test_on_a_power_law_the_rule_stops_where_the_price_of_a_flop_says(a, b):
    """L(C) = E + a·C^−b with a price of λ nats a FLOP is cheapest at C* = (a·b/λ)^(1/(b+1)).

    One-step look-ahead stops there, later by at most the window it looks back on.
    """
    horizon, minimum = 2, 0.005
    cheapest = (a * b / (minimum / horizon)) ** (1 / (b + 1))
    rule, rows, stopped = policy(min_gain_nats=minimum), [], None
    for flops in range(1, 2000):
        rows.append({"step": flops, "flops": flops, "validation_loss": 1 + a * flops**-b})
        state = State.from_rows([rows], horizon=horizon)
        if len(rows) >= 5 and rule.decide(state, Budget(), frozenset({"continue", "end"})).action == "end":
            stopped = flops
            break
    assert cheapest - 1 <= stopped <= cheapest + 5


def priced_stop(e, a, b, price, step, window):
    """Evaluations after which `price` ends L = E + a C^−b without noise, and C* in evaluations."""
    rule = policy(price=price, window=window, min_gain_nats=0, confidence=0.51)  # there is no noise
    for count in range(window, 400):
        losses = [e + a * (step * n) ** -b for n in range(1, count + 1)]
        state = State.from_rows([[
            {"step": n, "flops": round(step * n), "validation_loss": loss} for n, loss in enumerate(losses, 1)
        ]], horizon=10**18)  # fmt: skip
        if rule.decide(state, Budget(flops=10**18), INSIDE).action == "end":
            return count, (a * b / price) ** (1 / (b + 1)) / step
    raise AssertionError("it never ended")


@pytest.mark.parametrize(("a", "b", "best"), [(40.0, 0.2, 30.5), (200.0, 0.3, 60.2), (3000.0, 0.5, 101.7)])
def test_a_price_ends_a_noiseless_curve_within_an_evaluation_of_the_closed_form(a, b, best):
    step = 1e9
    price = a * b * (best * step) ** -(b + 1)  # so that C* = (ab/λ)^(1/(b+1)) is `best` evaluations
    ended, told = priced_stop(1.0, a, b, price, step, 3)
    assert told == pytest.approx(best)
    # three points tell the slope at the middle one, which is the first evaluation beyond C*
    assert best < ended - 1 <= best + 1
    at = np.array([best, ended]) * step
    priced = a * at**-b + price * at
    assert 0 <= priced[1] - priced[0] < 0.01 * a * at[0] ** -b


def falling(*losses, **state):
    rows = [{"step": n, "flops": n * FLOPS, "validation_loss": loss} for n, loss in enumerate(losses, 1)]
    return State.from_rows([rows], **({"horizon": 10 * FLOPS} | state))


def test_kappa_is_a_share_of_the_mean_gain_since_the_warm_up_and_rises_as_the_budget_shrinks():
    state = falling(4.0, 3.0, 2.5, 2.4)  # 1.6 nats over three evaluations' FLOPs
    mean = 1.6 / (3 * FLOPS)
    assert policy(kappa=0.1).threshold(state, math.inf) == pytest.approx(0.1 * mean)
    rising = policy(kappa=0.1, kappa_rise=2.0)
    assert rising.threshold(state, math.inf) == pytest.approx(0.1 * mean)  # no budget, nothing shrinks
    assert rising.threshold(state, 12 * FLOPS) == pytest.approx(0.1 * (1 + 2 * 0.25) * mean)  # 4 of 16 are spent
    assert rising.threshold(state, 0) == pytest.approx(0.3 * mean)
    dear = 2 * mean
    assert policy(kappa=0.1, price=dear).threshold(state, math.inf) == dear  # the larger of the two
    rounds = State.from_rows([segment([4.0, 3.5], phase="warmup"), segment([3.2, 3.1])])
    assert policy(kappa=1.0).threshold(rounds, math.inf) == pytest.approx(0.4 / (2 * FLOPS))
    assert policy().threshold(state, 0) == 0


@pytest.mark.parametrize(("kappa", "action"), [(0.2, "continue"), (0.3, "end")])
def test_a_slope_of_a_quarter_of_the_mean_gain_ends_by_kappa_above_a_quarter(kappa, action):
    state = falling(4.0, *(3.0 - 0.1 * n for n in range(7)))  # 1.6 over seven, then 0.1 each: 0.4375 of the mean
    assert pytest.approx(0.4375) == 0.1 / (1.6 / 7)
    settings = {"kappa": kappa * 0.4375 / 0.25, "window": 5, "min_gain_nats": 0}
    assert policy(**settings).decide(state, AMPLE, INSIDE).action == action


def test_it_ends_after_so_many_evaluations_in_a_row_that_do_not_pay():
    losses = [4.0, 3.0, 2.0, 1.99, 1.98, 1.97, 1.96, 1.95]
    price = 0.05 / FLOPS
    ends = {}
    for consecutive in (1, 2, 3):
        rule = policy(price=price, window=3, min_gain_nats=0, consecutive=consecutive)
        choices = [rule.decide(falling(*losses[:n]), AMPLE, INSIDE).action for n in range(2, len(losses) + 1)]
        ends[consecutive] = 2 + choices.index("end")
    assert ends == {1: 5, 2: 6, 3: 7}  # 2.0, 1.99, 1.98 is the first window below the price
    broken = [4.0, 3.0, 2.0, 1.99, 1.98, 1.5, 1.49, 1.48]
    rule = policy(price=price, window=3, min_gain_nats=0, consecutive=2)
    choices = [rule.decide(falling(*broken[:n]), AMPLE, INSIDE).action for n in range(2, len(broken) + 1)]
    assert "end" not in choices  # one evaluation alone does not end it


def test_what_a_longer_row_judges_is_what_each_evaluation_judged_then():
    losses = [4.0, 3.0, 2.5, 2.4, 2.38, 2.37, 2.365, 2.36]
    alone = policy(window=3, min_gain_nats=0.5, confidence=0.6)
    both = policy(window=3, min_gain_nats=0.5, confidence=0.6, consecutive=2)
    seen = []
    for n in range(3, len(losses) + 1):
        state = falling(*losses[:n], horizon=(20 - n) * FLOPS)
        left = Budget(flops=(30 - n) * FLOPS)
        seen.append(alone.decide(state, left, INSIDE).action)
        before = seen[-2] if len(seen) > 1 else "continue"
        expected = "end" if seen[-1] == before == "end" else "continue"
        assert both.decide(state, left, INSIDE).action == expected
    assert "end" in seen
