"""What may have moved under a selection, against scipy's rank correlation, and what policies make of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import spearmanr

from data_contracts.tables import SCORES
from stages.governor.drift import MOST_RANKED, agreement, shared_rows
from stages.governor.policy import BETWEEN, INSIDE, drifted
from stages.governor.state import Drift, State
from tests.stages.governor.test_policies import AMPLE, WARMUP, policy, segment

FALLING = segment([3.4, 3.0, 2.7, 2.45, 2.25, 2.1, 2.0])


def scores(ids, columns, score=None, exact=None):
    count = len(ids)
    return pa.Table.from_pydict(
        {
            "example_id": [f"{index:06d}" for index in ids],
            "source": ["s"] * count,
            "score": [float(np.mean(row)) for row in columns] if score is None else score,
            "group_scores": columns,
            "loss": [1.0] * count,
            "n_tokens": [4] * count,
            "n_answer_tokens": [2] * count,
            "exact": [True] * count if exact is None else exact,
        },
        schema=SCORES.schema,
    )


def test_agreement_is_spearmans_correlation_over_the_rows_that_both_computed():
    rng = np.random.default_rng(0)
    before_NJ, now_NJ = rng.normal(size=(300, 2)), rng.normal(size=(260, 2))
    now_NJ[:, 0] += 2 * before_NJ[40:, 0]
    exact = (rng.random(300) < 0.7).tolist(), (rng.random(260) < 0.7).tolist()
    before = scores(range(300), before_NJ.tolist(), exact=exact[0])
    now = scores(range(40, 300), now_NJ.tolist(), exact=exact[1])
    found, rows = agreement(before, now)
    both = np.array(exact[0][40:]) & np.array(exact[1])
    assert rows == both.sum()
    single = before_NJ.astype(np.float32).mean(axis=1), now_NJ.astype(np.float32).mean(axis=1)
    assert found == pytest.approx(spearmanr(single[0][40:][both], single[1][both]).statistic, abs=1e-6)


def test_an_average_over_rounds_does_not_hide_what_has_moved_and_scores_stand_in_where_there_are_no_columns():
    columns = [[1.0], [2.0], [3.0], [4.0]]
    averaged = scores(range(4), columns[::-1], score=[1.0, 2.0, 3.0, 4.0])
    assert agreement(scores(range(4), columns), averaged) == (pytest.approx(-1.0), 4)
    plain = scores(range(4), [[]] * 4, score=[4.0, None, 2.0, 1.0])
    assert agreement(scores(range(4), columns), plain) == (pytest.approx(-1.0), 3)


def test_no_agreement_is_told_of_rows_that_are_not_shared_or_all_alike():
    columns = [[1.0], [2.0], [3.0]]
    assert agreement(scores(range(3), columns), scores(range(3, 6), columns)) is None
    assert agreement(scores(range(3), columns), scores(range(3), [[1.0]] * 3)) is None


def test_of_a_large_pool_a_sample_is_ranked():
    value_N = np.random.default_rng(1).normal(size=(MOST_RANKED + 9, 1)).tolist()
    found, rows = agreement(scores(range(len(value_N)), value_N), scores(range(len(value_N)), value_N))
    assert (found, rows) == (pytest.approx(1.0), MOST_RANKED)


def test_shared_rows_are_counted_by_content():
    rows = pa.table({"example_id": ["a", "b", "c", "d"]})
    assert shared_rows(rows, pa.table({"example_id": ["b", "d", "e"]})) == 0.5
    assert shared_rows(rows, rows) == 1.0


def state(**drift) -> State:
    made = State.from_rows([WARMUP, FALLING], actions=("warmup", "reselect"), reselect_flops=10**14)
    return replace(made, drift=Drift(**drift))


@pytest.mark.parametrize("name", ["gain_left", "marginal_gain"])
def test_a_ranking_that_moved_is_chosen_by_anew_once_and_then_left_to_the_policy(name):
    rule = policy(name, least_agreement=0.4)
    moved = rule.decide(state(agreement=0.39, rows=80), AMPLE, BETWEEN)
    assert moved.action == "reselect"
    assert "0.39, below 0.4" in moved.reason
    assert moved.numbers["drift"] is True
    assert (moved.numbers["ranking_agreement"], moved.numbers["ranking_rows"]) == (0.39, 80)
    for calm in (state(agreement=0.4, rows=80), state(agreement=0.1, rows=80, answered=True), state(rows=0)):
        kept = rule.decide(calm, AMPLE, BETWEEN)
        assert kept.action == "continue"
        assert "drift" not in kept.numbers
    assert rule.decide(state(agreement=0.1, rows=80), AMPLE, BETWEEN - {"reselect"}).action == "continue"
    never = policy(name, least_agreement=-1)
    assert never.decide(state(agreement=-0.9, rows=80), AMPLE, BETWEEN).action == "continue"


@pytest.mark.parametrize("name", ["gain_left", "marginal_gain"])
def test_another_target_is_the_reason_of_the_first_choice(name):
    first = replace(State.from_rows([WARMUP], actions=("warmup",)), drift=Drift(target_shared=0.25))
    choice = policy(name).decide(first, AMPLE, BETWEEN)
    assert choice.action == "reselect"
    assert "25% of its rows are the same" in choice.reason
    assert (choice.numbers["target_rows_shared"], choice.numbers["drift"]) == (0.25, True)


def test_inside_training_and_with_a_budget_that_is_used_up_drift_decides_nothing():
    assert drifted(state(agreement=-1.0, rows=9), INSIDE, 0.5) is None
    spent = AMPLE.model_copy(update={"flops": 0})
    assert policy("gain_left").decide(state(agreement=-1.0, rows=9), spent, BETWEEN).action == "stop"
