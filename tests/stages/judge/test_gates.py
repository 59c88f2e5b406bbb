"""Gates fail closed, and pass exactly when the evidence says so."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from data_contracts.errors import ConfigError
from data_contracts.method import resolve
from stages.judge.gate import Gate
from stages.judge.verdict import verdict_of
from stages.text.overlap import Meeting
from tests.stages.judge.tables import evidence, losses, rows


def gate(name, **options):
    if name.startswith("better"):
        options = {"resamples": 999, **options}
    return resolve(Gate, {"method": name, **options}, "judge.gates")


BASE, BETTER, WORSE = losses(1, 3.0), losses(2, 2.5), losses(3, 3.5)


def test_a_clear_improvement_passes_with_the_interval_of_the_t_test():
    found = gate("better_than_base", resamples=9999).judge(evidence(rows("base", BASE), rows("candidate", BETTER)))
    expected = stats.ttest_rel(BETTER, BASE).confidence_interval(0.95)
    assert found.passed
    assert found.numbers["low"] == pytest.approx(expected.low, abs=0.005)
    assert found.numbers["high"] == pytest.approx(expected.high, abs=0.005)
    assert (found.numbers["before"], found.numbers["after"]) == pytest.approx((np.mean(BASE), np.mean(BETTER)))


def test_worse_equal_and_noisy_candidates_fail():
    noisy = (np.array(BASE) + np.random.default_rng(0).normal(0, 1, 40)).tolist()
    for candidate in (WORSE, BASE, noisy):
        assert not gate("better_than_base").judge(evidence(rows("base", BASE), rows("candidate", candidate))).passed


def test_long_answers_weigh_by_their_tokens():
    tokens = [1] * 39 + [1000]
    before = [1.0] * 39 + [1000.0]
    after = [0.5 + i / 1000 for i in range(39)] + [1200.0]  # better on 39 short items, worse on the long one
    found = gate("better_than_base").judge(
        evidence(rows("base", before, tokens=tokens), rows("candidate", after, tokens=tokens))
    )
    assert not found.passed
    assert found.numbers["after"] == pytest.approx(sum(after) / 1039)


def test_scores_are_compared_upwards():
    zeros, ones = [0.0] * 30, [1.0] * 25 + [0.0] * 5
    parts = [
        rows("base", [None] * 30, suite="exact_match", scores=zeros),
        rows("candidate", [None] * 30, suite="exact_match", scores=ones),
    ]
    assert gate("better_than_base", suite="exact_match", value="score").judge(evidence(*parts)).passed
    parts[0] = rows("base", [None] * 30, suite="exact_match", scores=ones)
    parts[1] = rows("candidate", [None] * 30, suite="exact_match", scores=zeros)
    assert not gate("better_than_base", suite="exact_match", value="score").judge(evidence(*parts)).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("broken", ["base", "candidate"])
@pytest.mark.parametrize("name", ["better_than_base", "threshold"])
def test_one_loss_that_is_not_finite_fails(bad, broken, name):
    parts = {"base": list(BASE), "candidate": list(BETTER)}
    parts[broken][7] = bad
    found = gate(name, **({"max": 1e9, "value": "loss"} if name == "threshold" else {})).judge(
        evidence(*(rows(model, values) for model, values in parts.items()))
    )
    if name == "threshold" and broken == "base":
        assert found.passed  # a threshold looks at the candidate alone
        return
    assert not found.passed
    assert "not finite" in found.reason
    assert "scarce" not in found.numbers or found.numbers["scarce"] is False


def test_missing_empty_unpaired_and_null_evidence_fails():
    better = gate("better_than_base")
    for parts in (
        [],
        [rows("base", BASE)],
        [rows("candidate", BETTER)],
        [rows("base", BASE), rows("candidate", BETTER, suite="other")],
        [rows("base", BASE), rows("candidate", BETTER[:30])],
        [rows("base", BASE), rows("candidate", [None] * 40)],
        [rows("base", BASE), rows("candidate", [None] * 10 + BETTER[10:])],
    ):
        found = better.judge(evidence(*parts))
        assert not found.passed, found
    assert not gate("threshold", max=9).judge(evidence()).passed
    assert not gate("contamination").judge(evidence(holdout_items=0)).passed
    assert not gate("contamination").judge(evidence(training_rows=0)).passed


def test_too_few_items_fail_as_scarce():
    found = gate("better_than_base").judge(evidence(rows("base", BASE[:19]), rows("candidate", BETTER[:19])))
    assert (found.passed, found.numbers["scarce"], found.numbers["items"]) == (False, True, 19)
    assert (
        gate("better_than_base", least_items=19)
        .judge(evidence(rows("base", BASE[:19]), rows("candidate", BETTER[:19])))
        .passed
    )


def test_without_a_champion_there_is_nothing_to_beat_and_an_unevaluated_one_fails():
    found = gate("better_than_champion").judge(evidence(rows("candidate", BETTER)))
    assert (found.passed, found.reason) == (True, "no champion yet")
    assert not gate("better_than_champion").judge(evidence(rows("candidate", BETTER), champion=True)).passed
    full = evidence(rows("candidate", BETTER), rows("champion", BASE), champion=True)
    assert gate("better_than_champion").judge(full).passed


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({"value": "loss", "max": 2.6}, True),
        ({"value": "loss", "max": 2.4}, False),
        ({"value": "perplexity", "max": math.exp(2.6)}, True),
        ({"value": "score", "min": -2.6}, True),
        ({"value": "score", "min": -2.4}, False),
        ({"value": "loss", "min": 2.4, "max": 2.6}, True),
    ],
)
def test_a_threshold_is_a_limit_on_one_number(options, passed):
    assert gate("threshold", **options).judge(evidence(rows("candidate", BETTER))).passed is passed


def test_a_threshold_without_a_limit_is_refused():
    with pytest.raises(ConfigError, match="min"):
        gate("threshold")


def meeting(item, kind):
    return Meeting(item, "row", kind, 1.0, "")


def test_contamination_counts_each_item_once_by_its_strongest_kind():
    some = evidence(meetings=[meeting("a", "ngram"), meeting("a", "normalised"), meeting("b", "prompt")])
    found = gate("contamination").judge(some)
    assert (found.passed, found.numbers["whole"], found.numbers["prompts"], found.numbers["ngrams"]) == (False, 1, 1, 0)
    assert gate("contamination", most_whole=0.05, most_prompts=0.05).judge(some).passed
    assert gate("contamination").judge(evidence()).passed


DIGEST = "d" * 64
GATES = ("better_than_base", "better_than_champion", "contamination")


def verdict(given, *, candidate=DIGEST, names=GATES):
    return verdict_of([gate(name) for name in names], given, candidate=candidate, champion=None)


def test_verdicts_promote_reject_and_hold():
    good = verdict(evidence(rows("base", BASE), rows("candidate", BETTER)))
    assert good.outcome == "promote"
    assert good.numbers["holdout_loss_before"] == pytest.approx(np.mean(BASE))
    assert good.numbers["holdout_loss_after"] == pytest.approx(np.mean(BETTER))
    assert good.numbers["difference_high"] < 0
    assert good.numbers["items"] == 40
    assert "holdout loss 3" in good.reason
    bad = verdict(evidence(rows("base", BASE), rows("candidate", BASE)))
    assert bad.outcome == "reject"
    assert "the base model was not improved" in bad.reason
    assert verdict(evidence(rows("base", BASE[:5]), rows("candidate", BETTER[:5]))).outcome == "hold"
    leaked = evidence(rows("base", BASE), rows("candidate", BETTER), meetings=[meeting("a", "exact")])
    assert verdict(leaked).outcome == "reject"
    assert verdict(evidence(), candidate=None).outcome == "reject"
    assert verdict(evidence()).outcome == "reject"


def test_the_comparison_with_the_base_is_kept_whatever_the_gates():
    found = verdict(evidence(rows("base", BASE), rows("candidate", WORSE)), names=("contamination",))
    assert found.outcome == "promote"
    assert found.numbers["holdout_loss_after"] == pytest.approx(np.mean(WORSE))
    assert "the base model was not improved" in found.reason


value = st.none() | st.floats(0, 20) | st.sampled_from([math.nan, math.inf, -math.inf])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(value, value), max_size=30),
    st.sampled_from(["base", "champion"]),
    st.booleans(),
)
def test_no_evidence_that_is_broken_anywhere_promotes(pairs, other, missing):
    parts = [rows("candidate", [after for _, after in pairs])]
    if not missing:
        parts.append(rows(other, [before for before, _ in pairs]))
    given_ = evidence(*parts, champion=other == "champion")
    names = [f"better_than_{other}"]
    found = verdict_of([gate(name) for name in names], given_, candidate=DIGEST, champion=None)
    json.dumps(found.model_dump(mode="json"), allow_nan=False)
    finite = all(v is not None and math.isfinite(v) for pair in pairs for v in pair)
    if missing or len(pairs) < 20:
        assert found.outcome != "promote"
    elif found.outcome == "promote":
        assert all(v is None or math.isfinite(v) for pair in pairs for v in pair)
        assert all((before is None) == (after is None) for before, after in pairs)
        whole = [(b, a) for b, a in pairs if b is not None]
        assert len(whole) >= 20
        assert sum(a for _, a in whole) < sum(b for b, _ in whole)
    elif finite:
        assert found.outcome == "reject"
