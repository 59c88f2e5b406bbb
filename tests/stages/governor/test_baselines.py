"""The baseline policies against a peer library (Ray Tune's schedulers) and direct counts."""

from __future__ import annotations

import json
import math
from statistics import mean, median
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data_contracts.cost import Budget
from data_contracts.errors import ConfigError
from data_contracts.method import resolve
from stages.governor.policy import BETWEEN, INSIDE, Policy
from stages.governor.records import RecordedCurve
from stages.governor.state import State

FEW = frozenset({"continue", "end"})
SETTINGS = {
    "fixed_rounds": {"rounds": 2},
    "asha": {"grace_flops": 2, "curves": [{"flops": [1, 2, 8], "values": [3.0, 2.0, 1.0]}]},
    "median_stop": {"least_records": 1, "curves": [{"flops": [1, 2, 8], "values": [3.0, 2.0, 1.0]}]},
    "share_past_best": {},
    "gain_left": {},
}


def policy(name, **given_settings):
    return resolve(Policy, {"method": name, **SETTINGS[name], **given_settings}, "govern.policy")


def state_of(*segments, direction="minimise"):
    rows = [
        [{"step": i + 1, "flops": i + 1, "validation_loss": y} for i, y in enumerate(segment)] for segment in segments
    ]
    return State.from_rows(rows, direction=direction)


def stops_at(rule, losses):
    """Return the first evaluation (from 1) after which the rule ends; None where it never does."""
    for n in range(1, len(losses) + 1):
        if rule.decide(state_of(losses[:n]), Budget(), FEW).action == "end":
            return n
    return None


losses = st.lists(st.floats(0.1, 10), min_size=1, max_size=16)


@pytest.mark.parametrize("name", SETTINGS)
@given(
    segments=st.lists(st.lists(st.floats(0.1, 10) | st.just(math.nan), min_size=1, max_size=6), min_size=1, max_size=4),
    left=st.integers(0, 3),
    allowed=st.sampled_from([BETWEEN, INSIDE, FEW, frozenset({"anneal", "stop"})]),
)
@settings(max_examples=40)
def test_each_returns_what_is_allowed_says_why_in_finite_numbers_and_is_pure(name, segments, left, allowed):
    state = state_of(*segments)
    choice = policy(name).decide(state, Budget(flops=left), allowed)
    assert choice.action in allowed
    assert choice.reason
    json.dumps(choice.numbers, allow_nan=False)
    assert choice == policy(name).decide(state, Budget(flops=left), allowed)
    if left == 0 or any(math.isnan(y) for segment in segments for y in segment):
        assert choice.action in {"end", "stop"}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_lets_the_decay_run_to_its_end_and_stops_after_it(name):
    state = State.from_rows([[{"step": 1, "flops": 9, "validation_loss": 9.0, "phase": "decay"}]])
    assert policy(name).decide(state, Budget(), INSIDE).action == "continue"
    assert policy(name).decide(state, Budget(), BETWEEN).action == "stop"


def test_rounds_are_counted_and_the_inside_of_a_segment_is_never_cut():
    rule = policy("fixed_rounds", rounds=2)
    assert rule.decide(state_of([3.0]), Budget(), BETWEEN).action == "reselect"
    assert rule.decide(state_of([3.0], [4.0]), Budget(), BETWEEN).action == "reselect"
    assert rule.decide(state_of([3.0], [4.0], [5.0]), Budget(), BETWEEN).action == "anneal"
    assert stops_at(rule, [float(i) for i in range(1, 30)]) is None


@pytest.fixture(scope="module")
def ray_bracket():
    return pytest.importorskip("ray.tune.schedulers.async_hyperband")._Bracket


@pytest.mark.parametrize("reduction", [2.0, 3.0, 4.0])
def test_asha_stops_where_rays_asha_stops(ray_bracket, reduction):
    """Each run of a stream is judged by Ray's bracket and by ours, with the runs before it as records."""
    rng, records, decided = np.random.default_rng(int(reduction)), [], []
    bracket = ray_bracket(min_t=2, max_t=10**6, reduction_factor=reduction, s=0)
    for run in range(40):
        curve = (rng.uniform(0.5, 3) + 2 / np.arange(1, 19)).tolist()
        theirs = None
        for t, loss in enumerate(curve, start=1):
            if bracket.on_result(SimpleNamespace(trial_id=str(run)), t, -loss) == "STOP":
                theirs = t
                break
        ours = stops_at(policy("asha", grace_flops=2, reduction=reduction, curves=records), curve)
        assert ours == theirs
        decided.append(ours)
        kept = curve[:theirs]
        records.append(RecordedCurve(flops=tuple(range(1, len(kept) + 1)), values=tuple(kept)))
    assert 10 < sum(stop is not None for stop in decided) < 40


def test_without_records_asha_and_the_median_rule_never_stop_a_finite_run():
    rising = [float(i) for i in range(1, 30)]
    assert stops_at(policy("asha", curves=[]), rising) is None
    assert stops_at(policy("median_stop", curves=[]), rising) is None


@given(st.lists(losses, min_size=3, max_size=6), losses)
def test_the_median_rule_stops_where_a_direct_count_says(records, run):
    curves = [{"flops": list(range(1, len(r) + 1)), "values": r} for r in records]
    expected = None
    for n in range(1, len(run) + 1):
        means = [mean(r[:n]) for r in records if len(r) >= n]
        if len(means) >= 3 and min(run[:n]) > median(means) + 1e-12:
            expected = n
            break
    found = stops_at(policy("median_stop", curves=curves, least_records=3), run)
    assert found == expected


@given(losses, st.floats(0.1, 2), st.integers(1, 4))
def test_the_share_past_the_best_is_used_up_where_a_direct_count_says(run, share, least):
    expected = None
    for n in range(1, len(run) + 1):
        at = run.index(min(run[:n])) + 1
        if n - at >= least and n - at > share * at:
            expected = n
            break
    assert stops_at(policy("share_past_best", share=share, least=least), run) == expected


def test_a_maximised_metric_is_compared_the_other_way_round():
    records = [{"flops": [1, 2, 3], "values": [0.5, 0.6, 0.7]}] * 3
    rows = [{"step": i, "flops": i, "validation_loss": v} for i, v in enumerate([0.1, 0.2, 0.3], start=1)]
    good = [{**row, "validation_loss": row["validation_loss"] + 0.6} for row in rows]
    for name, more in (("median_stop", {"least_records": 3}), ("asha", {"grace_flops": 2})):
        rule = policy(name, curves=records, **more)
        assert rule.decide(State.from_rows([rows], direction="maximise"), Budget(), FEW).action == "end"
        assert rule.decide(State.from_rows([good], direction="maximise"), Budget(), FEW).action == "continue"


def test_records_whose_flops_do_not_rise_are_refused():
    with pytest.raises(ValidationError, match="rise"):
        RecordedCurve(flops=(2, 1), values=(1.0, 2.0))
    with pytest.raises(ConfigError, match="rise"):
        policy("asha", curves=[{"flops": [1, 2], "values": [1.0]}])
