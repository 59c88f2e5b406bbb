"""The schedule against its closed forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.train.schedule import Schedule, decay_factor


def test_warm_up_rises_linearly_to_the_peak_and_stays_there():
    schedule = Schedule(peak=0.8, warmup_steps=4, shape="linear")
    assert [schedule.at(step, step) for step in range(6)] == [
        (pytest.approx(0.2), "warmup"),
        (pytest.approx(0.4), "warmup"),
        (pytest.approx(0.6), "warmup"),
        (0.8, "stable"),
        (0.8, "stable"),
        (0.8, "stable"),
    ]


def test_a_later_segment_goes_on_with_the_runs_warm_up():
    assert Schedule(1.0, 10, "linear").at(0, 5) == (pytest.approx(0.6), "warmup")
    assert Schedule(1.0, 0, "linear").at(0, 0) == (1.0, "stable")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [1, 1, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", [1] * 7 + [(1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3)]),
        ("sqrt", [1] * 7 + [1 - math.sqrt(k / 4) for k in (1, 2, 3)]),
    ],
)
def test_an_annealing_segment_decays_over_its_last_share(shape, expected):
    schedule = Schedule(2.0, 0, shape).annealing(0, 10, 0.4)
    assert [schedule.at(step, 100 + step)[0] for step in range(10)] == pytest.approx([2 * value for value in expected])
    assert [schedule.at(step, 100 + step)[1] for step in range(10)] == ["stable"] * 6 + ["decay"] * 4
    assert schedule.at(10, 110)[0] == pytest.approx(0, abs=1e-15)


def test_the_decay_is_a_share_of_the_run_and_no_longer_than_its_last_segment():
    plain = Schedule(1.0, 0, "linear")
    assert plain.annealing(0, 10, 0.2, 10) == plain.annealing(0, 10, 0.4)
    assert plain.annealing(0, 10, 0.4, 90) == plain.annealing(0, 10, 1.0)


def test_a_decay_begun_inside_a_segment_ends_it():
    schedule, steps = Schedule(1.0, 0, "linear").decaying_now(30, 100, 0.2)
    assert steps == 50
    assert schedule.at(29, 29) == (1.0, "stable")
    assert schedule.at(40, 40) == (pytest.approx(0.5), "decay")
    assert Schedule(1.0, 0, "linear").decaying_now(95, 100, 0.2)[1] == 100


@given(st.sampled_from(["linear", "cosine", "sqrt"]), st.floats(0, 1), st.floats(0, 1))
def test_every_decay_falls_from_one_to_zero(shape, a, b):
    low, high = sorted((a, b))
    assert 0 <= decay_factor(shape, high) <= decay_factor(shape, low) <= 1
    assert decay_factor(shape, 0.0) == 1
    assert decay_factor(shape, 1.0) == pytest.approx(0)


@given(st.integers(1, 60), st.floats(0.01, 1.0))
def test_the_state_of_a_schedule_gives_the_same_rates(steps, share):
    schedule = Schedule(3e-4, 5, "cosine").annealing(0, steps, share)
    again = Schedule.of(schedule.state())
    assert [again.at(step, step) for step in range(steps)] == [schedule.at(step, step) for step in range(steps)]
    assert all(schedule.at(step, step)[0] > 0 for step in range(steps))
