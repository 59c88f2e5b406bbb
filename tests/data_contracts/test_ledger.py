"""The ledger is a fold: each identity once, every lost attempt, whatever the order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.cost import Cost, Price
from data_contracts.ledger import Entry, Ledger

COSTS = st.dictionaries(
    st.sampled_from(["train", "eval", "score"]),
    st.builds(
        Cost, flops=st.integers(0, 100), peak_bytes=st.integers(0, 100), seconds=st.integers(0, 80).map(lambda n: n / 8)
    ),
    max_size=3,
)


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    """Draw attempts; one identity always has one stage and one cost, a lost run its own."""
    by_identity = draw(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.sampled_from(["train", "score"]), COSTS)))
    done = [Entry(identity, f"run-{identity}", stage, costs) for identity, (stage, costs) in by_identity.items()]
    lost = [
        Entry("a", f"lost-{n}", "train", costs, lost=True) for n, costs in enumerate(draw(st.lists(COSTS, max_size=3)))
    ]
    return done + lost


@given(entries(), st.randoms())
def test_order_and_repetition_do_not_matter(given_entries: list[Entry], random: st.Random) -> None:  # type: ignore[name-defined]
    shuffled = given_entries * 2
    random.shuffle(shuffled)
    assert Ledger.fold(shuffled) == Ledger.fold(given_entries)


@given(entries())
def test_sums_by_stage_by_cause_and_in_total_agree_with_plain_addition(given_entries: list[Entry]) -> None:
    ledger = Ledger.fold(given_entries)
    every = [cost for entry in given_entries for cost in entry.costs.values()]
    assert ledger.total.flops == sum(cost.flops for cost in every)
    assert ledger.total.seconds == sum(cost.seconds for cost in every)
    assert ledger.total.peak_bytes == max((cost.peak_bytes for cost in every), default=0)
    for stage, cost in ledger.by_stage().items():
        assert cost.flops == sum(c.flops for e in given_entries if e.stage == stage for c in e.costs.values())
    for cause, cost in ledger.by_cause().items():
        assert cost.flops == sum(e.costs[cause].flops for e in given_entries if cause in e.costs)


def test_work_of_a_stage_that_made_the_same_by_another_identity_counts_once() -> None:
    cost = {"train": Cost(flops=7)}
    same = [Entry(identity, identity, "train", cost, content="x") for identity in "ab"]
    other = Entry("c", "c", "train", cost, content="y")
    elsewhere = Entry("d", "d", "score", cost, content="x")
    lost = Entry("a", "l", "train", cost, lost=True)
    assert Ledger.fold(same).total.flops == 7
    assert Ledger.fold([*same, other, elsewhere, lost]).total.flops == 4 * 7


def test_training_is_warm_up_segments_and_probes_of_choosing_and_no_adapters_of_a_mixture() -> None:
    costs = [("begin", "warm_up"), ("begin", "eval"), ("train", "train"), ("train", "probe"), ("mix", "probe")]
    entries = [
        Entry(str(n), str(n), stage, {cause: Cost(flops=10**n, seconds=2.0**n)})
        for n, (stage, cause) in enumerate(costs)
    ]
    assert Ledger.fold(entries).training() == Cost(flops=1101, seconds=13.0)


@given(entries())
def test_money_is_seconds_at_the_price_of_each_stages_hour_and_changes_nothing_else(given_entries: list[Entry]) -> None:
    ledger = Ledger.fold(given_entries)
    priced = ledger.priced(Price(hour=3600, stages={"score": 7200}))
    by_stage = {stage: cost.seconds for stage, cost in ledger.by_stage().items()}
    assert priced.total.money == pytest.approx(by_stage.get("train", 0) + 2 * by_stage.get("score", 0))
    assert priced.priced(Price(hour=0)) == ledger
    assert ledger.priced(None) is ledger


def test_an_identity_that_was_made_twice_is_charged_once_and_a_lost_attempt_beside_it() -> None:
    cost = {"train": Cost(flops=5)}
    done = [Entry("x", "run-1", "train", cost), Entry("x", "run-2", "train", cost)]
    assert Ledger.fold(done).total.flops == 5
    assert Ledger.fold([*done, Entry("x", "run-0", "train", cost, lost=True)]).total.flops == 10


def test_no_attempts_cost_nothing() -> None:
    assert Ledger.fold([]).total == Cost()
