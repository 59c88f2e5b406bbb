"""The order of visits: permutations, windows and micro-batches, as properties."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.config import TrainConfig
from data_contracts.errors import ConfigError
from stages.train.order import Visits, lay_out, refuse_no_step
from stages.train.windows import due_steps
from tests.stages.train.small import plan_of

REPEATS = st.lists(st.integers(1, 3), min_size=1, max_size=30).map(lambda values: np.array(values, np.int32))


@given(REPEATS, st.integers(1, 3), st.integers(1, 12), st.integers(0, 9))
def test_every_epoch_visits_each_row_as_often_as_it_repeats(repeats, epochs, window, seed):
    visits = Visits(repeats, epochs, window, seed)
    stream = np.concatenate([visits[step] for step in range(visits.steps)])
    assert len(stream) == epochs * repeats.sum()
    for epoch in stream.reshape(epochs, -1):
        assert Counter(epoch.tolist()) == dict(enumerate(repeats.tolist()))


@given(REPEATS, st.floats(0.1, 2.5), st.integers(1, 12))
def test_windows_can_be_asked_for_in_any_order(repeats, epochs, window):
    forwards = Visits(repeats, epochs, window, 3)
    stream = [forwards[step].tolist() for step in range(forwards.steps)]
    backwards = Visits(repeats, epochs, window, 3)
    assert [backwards[step].tolist() for step in reversed(range(backwards.steps))] == stream[::-1]
    with pytest.raises(IndexError):
        forwards[forwards.steps]


@given(REPEATS, st.integers(1, 12), st.lists(st.floats(0.1, 1.5), min_size=2, max_size=4))
def test_segments_one_after_the_other_are_one_stream(repeats, window, lengths):
    stream: list[int] = []
    for epochs in lengths:
        part = Visits(repeats, epochs, window, 3, start=len(stream))
        stream += [row for step in range(part.steps) for row in part[step].tolist()]
        assert part.visited(part.steps) == len(stream)
    whole = Visits(repeats, len(stream) / int(repeats.sum()), window, 3)
    assert stream == [row for step in range(whole.steps) for row in whole[step].tolist()]


PHASED = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=30)


@settings(deadline=None)
@given(PHASED, st.integers(1, 2), st.integers(1, 12), st.integers(0, 9))
def test_a_phase_ends_before_the_next_begins_in_every_epoch_and_a_rows_visits_are_spread_over_its_phase(
    rows, epochs, window, seed
):
    repeats, phases = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    visits = Visits(repeats, epochs, window, seed, phases=phases)
    stream = np.concatenate([visits[step] for step in range(visits.steps)])
    for epoch in stream.reshape(epochs, -1):
        assert sorted(epoch.tolist()) == np.repeat(np.arange(len(rows)), repeats).tolist()
        assert phases[epoch].tolist() == sorted(phases[epoch].tolist())
        seen: Counter[int] = Counter()
        low: dict[int, float] = {}  # no visit j of r stands behind one whose part begins where that of j ends, or later
        for row in epoch.tolist():
            phase, start = int(phases[row]), seen[row] / repeats[row]
            low[phase] = max(low.get(phase, 0.0), start)
            seen[row] += 1
            assert seen[row] / repeats[row] > low[phase]
        begun = {0: 0}  # steps to phases seen, by brute force
        for step in range(1, visits.steps + 1):
            begun[step] = len(set(phases[stream[: min(step * visits.width, len(epoch))]].tolist()))
        assert all(visits.phases_after(step)[0] == begun[step] for step in range(1, visits.steps + 1))


def test_rows_of_one_phase_are_shuffled_and_differently_in_each_epoch():
    visits = Visits(np.ones(40, np.int32), 2.0, 20, 5, phases=np.repeat([0, 1], 20).astype(np.int32))
    first, again = visits[0].tolist(), visits[2].tolist()
    assert sorted(first) == sorted(again) == list(range(20))
    assert first != sorted(first)
    assert first != again


def test_one_phase_and_no_repeats_is_a_permutation_of_the_rows():
    visits = Visits(np.ones(50, np.int32), 1.0, 50, 7, phases=np.zeros(50, np.int32))
    assert visits[0].tolist() == np.random.default_rng([7, 0]).permutation(50).tolist()


def test_a_fraction_of_an_epoch_is_a_fraction_of_its_visits():
    visits = Visits(np.ones(10, np.int32), 0.5, 4, 0)
    assert [len(visits[step]) for step in range(visits.steps)] == [4, 1]
    assert Visits(np.ones(10, np.int32), 1.5, 4, 0).steps == 4
    assert Visits(np.ones(10, np.int32), 0.001, 4, 0).total == 1


def test_a_last_window_that_is_not_full_is_dropped_where_asked():
    assert Visits(np.ones(10, np.int32), 1.0, 4, 0, drop_last=True).steps == 2


def test_fewer_rows_than_a_window_make_one_smaller_window_an_epoch():
    visits = Visits(np.ones(3, np.int32), 4.0, 32, 0)
    assert [sorted(visits[step].tolist()) for step in range(visits.steps)] == [[0, 1, 2]] * 4


def test_two_seeds_give_two_orders():
    first, second = (Visits(np.ones(50, np.int32), 1.0, 50, seed) for seed in (1, 2))
    assert first[0].tolist() != second[0].tolist()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 5), st.sampled_from([None, 40, 64]))
def test_a_layout_holds_every_place_once_and_no_more_rows_than_asked(lengths, micro_batch, row_tokens):
    layout = lay_out(lengths, micro_batch, row_tokens=row_tokens)
    assert sorted(place for micro in layout for place in micro.places) == list(range(len(lengths)))
    assert all(1 <= len(micro.rows) <= micro_batch for micro in layout)
    sums = [[sum(lengths[place] for place in row) for row in micro.rows] for micro in layout]
    assert [micro.padded for micro in layout] == [max(inner) for inner in sums]
    if row_tokens is None:
        assert [one for inner in sums for one in sorted(inner, reverse=True)] == sorted(lengths, reverse=True)
    else:
        assert all(total <= row_tokens for inner in sums for total in inner)


def test_no_step_at_all_is_refused_with_its_numbers():
    plan = plan_of(micro_batch=4, accumulation=8)
    with pytest.raises(ConfigError, match=r"0 steps: 3 rows < 4 x 8 = 32 per step with drop_last"):
        refuse_no_step(3, plan, TrainConfig(drop_last=True))
    refuse_no_step(3, plan, TrainConfig(drop_last=False))
    refuse_no_step(32, plan, TrainConfig(drop_last=True))


@given(st.integers(1, 200), st.integers(1, 20))
def test_evaluations_are_equally_spaced_and_the_last_step_is_one(steps, evaluations):
    due = sorted(due_steps(steps, evaluations))
    assert due[-1] == steps
    assert len(due) == min(steps, evaluations)
    gaps = np.diff([0, *due])
    assert gaps.max() - gaps.min() <= 1
