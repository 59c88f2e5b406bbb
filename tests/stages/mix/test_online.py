"""ODM and DoReMi against their papers' updates written out, and visits found among the pool's rows."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from data_contracts.errors import ConfigError
from data_contracts.tables import EXAMPLE_LOSSES
from stages.mix.methods.doremi import Doremi
from stages.mix.methods.odm import Odm, exp3
from stages.mix.visits import mean_losses, visited
from tests.stages.mix.setting import given, visits

STEPS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 2), st.floats(0.1, 50), st.integers(1, 9)), min_size=1, max_size=40
)


@settings(deadline=None)
@drawn(STEPS, st.floats(0, 0.99))
def test_odm_is_the_papers_recursion_written_out(rows, alpha):
    rows = sorted(rows, key=lambda row: row[0])
    share = [0.5, 0.2, 0.3]
    reward = [0.1, math.nan, 0.4]
    found = Odm(alpha=alpha).mix(given(share_P=np.array(share), state_P=np.array(reward), visited=(visits(rows),)))
    running = [0.1, 0.0, 0.4]
    for step in sorted({row[0] for row in rows}):
        for part in range(3):
            own = [row for row in rows if row[0] == step and row[1] == part]
            if own:
                loss = sum(row[2] for row in own) / sum(row[3] for row in own)
                running[part] = alpha * running[part] + (1 - alpha) * loss / share[part]
    last = max(row[0] for row in rows)
    epsilon = [1 / 3] + [min(1 / 3, math.sqrt(math.log(3) / (3 * t))) for t in range(1, last + 2)]
    weights = [math.exp(epsilon[last] * (value - max(running))) for value in running]
    expected = [(1 - 3 * epsilon[last + 1]) * w / sum(weights) + epsilon[last + 1] for w in weights]
    assert found.state_P == pytest.approx(running)
    assert found.share_P == pytest.approx(expected)
    assert found.share_P.sum() == pytest.approx(1)


def test_odm_starts_with_equal_shares_and_a_part_with_more_loss_gets_more_later():
    assert exp3(np.array([5.0, 1.0, 1.0]), 1) == pytest.approx([1 / 3] * 3)
    later = exp3(np.array([5.0, 1.0, 1.0]), 50)
    assert later[0] > later[1] == later[2] > 0


@settings(deadline=None)
@drawn(STEPS, st.floats(0.1, 5), st.floats(0, 0.1))
def test_doremi_is_exponentiated_gradient_on_the_excess_at_least_zero_of_each_visit(rows, eta, smoothing):
    share, reference = np.array([0.5, 0.2, 0.3]), {"a": 1.0, "b": 2.0, "c": 0.5}
    method = Doremi(eta=eta, smoothing=smoothing, reference=reference)
    half = len(rows) // 2
    segments = tuple(visits(part) for part in (rows[:half], rows[half:]) if part)
    found = method.mix(given(share_P=share, visited=segments))
    excess = []
    for part, name in enumerate("abc"):
        own = [row for row in rows if row[1] == part]
        above = sum(max(0.0, loss - reference[name] * tokens) for _, _, loss, tokens in own)
        excess.append(above / sum(row[3] for row in own) if own else 0.0)
    grown = [a * math.exp(eta * (e - max(excess))) for a, e in zip(share, excess, strict=True)]
    expected = [(1 - smoothing) * value / sum(grown) + smoothing / 3 for value in grown]
    assert found.share_P == pytest.approx(expected)


def test_doremi_by_hand_wants_a_loss_for_every_part():
    with pytest.raises(ConfigError, match="there is none for 'b'"):
        Doremi(reference={"a": 1.0}).mix(given(visited=(visits([(1, 0, 1.0, 1)]),)))


class Bench:
    """A laboratory that answers from a table: the reference's loss sum of every row."""

    def __init__(self, losses):
        self.losses, self.asked = losses, []

    def probe(self, name, share, how):
        self.asked.append((name, share / share.sum()))

    def pool_losses(self, rows, adapters, weights):
        return np.array([self.losses[int(row)] for row in rows]), None


def test_doremi_with_a_trained_reference_compares_each_row_with_itself_on_its_last_visit():
    rows = [(1, 0, 9.0, 2), (2, 0, 5.0, 2), (2, 1, 3.0, 1), (3, 2, 1.0, 1)]
    bench = Bench({0: 3.0, 10: 1.0, 30: 2.0})
    found = Doremi(smoothing=0.0).mix(given(visited=(visits(rows),), lab=lambda: bench))
    grown = np.array([10 * math.exp((5 - 3) / 2), 20 * math.exp(2.0), 30.0])
    assert found.share_P == pytest.approx(grown / grown.sum())
    ((name, share),) = bench.asked
    assert name == "reference"
    assert share == pytest.approx(np.array([50, 100, 300]) / 450)  # the pool's, of answer tokens


def test_visits_are_found_among_the_pools_rows_and_others_left_out():
    ids = pa.chunked_array([["a", "b"], ["c", "d"]])
    part = np.array([0, 0, 1, 1], dtype=np.int32)
    losses = pa.table(
        {
            "step": [1, 1, 2, 2, 3],
            "position": [0, 1, 0, 1, 0],
            "example_id": ["d", "target", "a", "d", "b"],
            "loss_sum": [4.0, 1.0, 2.0, 3.0, math.nan],
            "answer_tokens": [2, 1, 1, 2, 1],
        },
        schema=EXAMPLE_LOSSES.schema,
    )
    found = visited(losses, ids, part)
    assert found.step_V.tolist() == [1, 2, 2]
    assert found.row_V.tolist() == [3, 0, 3]
    assert found.part_V.tolist() == [1, 0, 1]
    mean = mean_losses(found.part_V, found.loss_V, found.tokens_V, 3)
    assert mean[:2] == pytest.approx([2.0, 7 / 4])
    assert np.isnan(mean[2])
