"""The stage `quote` on curves written by hand: a law planted from the base on, totals that add up, rates of time."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.cost import Cost
from data_contracts.ledger import Entry, Ledger
from data_contracts.quotes import HOURS_FILE, Hours, JointOffer, Quote, Span, summed
from data_contracts.records import Decision, Likeness, WeighedArm, Weighing
from stages.governor.quoting import KEPT
from stages.quote.hours import KEEPING, MODEL_OFF, block_rates
from stages.quote.joint import ranked
from stages.quote.stage import STAGE, QuoteSlice
from stages.stage import Inputs
from tests.local_work import work_for
from tests.stages.govern.test_stage import PLAN, row

STEP, LIMIT, SPENT = 100, 100_000, 1700
ARMS = (
    {"name": "random", "selector": {"method": "random"}, "epochs": 1.0},
    {"name": "bm25", "scorer": {"method": "bm25"}},
)
WAY = {"technique": "full", "place": 0, "precision": "float32", "savings": "", "fits": True, "reason": "ranks lower"}
CONSIDERED = (
    {**WAY, "micro_batch": 4, "examples": 8, "tokens_per_second": 2.0, "reason": "chosen"},
    {**WAY, "micro_batch": 2, "examples": 8, "tokens_per_second": 1.0},
    {**WAY, "micro_batch": 3, "examples": 9, "tokens_per_second": 1.5},
    {**WAY, "micro_batch": 8, "examples": 8, "tokens_per_second": 4.0, "fits": False},
    {**WAY, "technique": "lora", "place": 1, "micro_batch": 4, "examples": 8, "tokens_per_second": 3.0},
)
PRICED = PLAN.model_copy(update={"pass_flops": 10**5, "tokens_per_second": 2.0, "considered": CONSIDERED})


def law(x):
    """Return the planted loss at x, FLOPs of training and a step."""
    return 5.0 - 0.3 * math.log(x / STEP)


def curve(flops, losses):
    given = {"phase": "stable", "tokens": 0, "train_loss": 1.0, "validation_se": 0.1}
    rows = [
        row({**given, "step": place, "flops": spent, "validation_loss": loss})
        for place, (spent, loss) in enumerate(zip(flops, losses, strict=True))
    ]
    return {name: [item[name] for item in rows] for name in rows[0]}


def arm(name, loss, **more):
    values = {
        "fraction": 0.1, "price_flops": 0, "spent_flops": 2000, "probe_flops": 2000, "probe_loss": loss, "probe_se": 0.0,
        "training_flops": 1, "expected_loss": 0.0, "low": 0.0, "high": 0.0, "gain": 0.0, "gain_low": 0.0,
        "gain_high": 0.0, "probability": 0.0, "reuses": None, **more,
    }  # fmt: skip
    return WeighedArm(name=name, **values)


def quote(tmp_path, weighing=None, likeness=None, *, trained=True, follow="random", binding="flops", policy=None):
    """Run the stage; return the quote and its hours."""
    maker = work_for(STAGE, tmp_path / "made")
    maker.gives = {
        name: name.rstrip("0123456789") for name in ("plan", "decision", "weighing", "likeness", "curve0", "curve1")
    }
    maker.record("plan", PRICED)
    given = {"plan": [maker.artifact("plan")]}
    if trained:
        numbers = {"spendable_flops": LIMIT, "step_flops": STEP, "least_segment_flops": 200, "rounds_left": 2}
        numbers["binding"] = binding
        maker.record("decision", Decision(action="reselect", reason="", round=0, numbers=numbers))
        warm, probe = (50, 1050), (1000, 2000)  # the base is evaluated for 50
        maker.table("curve0", curve(warm, [law(STEP), law(1000 + STEP)]))
        maker.table("curve1", curve(probe, [law(1000 + STEP + spent) for spent in probe]))
        given |= {"decision": [maker.artifact("decision")], "curve": [maker.artifact(f"curve{i}") for i in (0, 1)]}
    for name, record in (("weighing", weighing), ("likeness", likeness)):
        if record is not None:
            maker.record(name, record)
            given[name] = [maker.artifact(name)]
    spent = Ledger.fold([Entry("i", "r", "begin", {"warm_up": Cost(flops=SPENT, seconds=17.0, joules=51.0)})])
    work = work_for(STAGE, tmp_path / "work", ledger=spent if trained else Ledger())
    by = ARMS[0] if follow == "random" else ARMS[1]
    config = QuoteSlice(
        budget={"flops": LIMIT},
        score={"scorer": by.get("scorer", {"method": "influence"})},
        select={"selector": by.get("selector", {"method": "top_k"})},
        govern={"policy": policy or {"method": "gain_left"}},
        auto={"arms": ARMS},
    )
    STAGE.run(config, Inputs(given), work)
    hours = Hours.model_validate_json(work.measured("quote", HOURS_FILE).read_bytes())
    assert work.measured("quote", "quote.html").is_file()
    return work.artifact("quote").record(Quote), hours


def raced(chosen="bm25", **more):
    arms = (arm("random", law(3100)), arm("bm25", law(3100) - 0.1, **more))
    return Weighing(chosen=chosen, reason="", start_loss=5.0, spendable_flops=90_000, arms=arms)


def test_a_planted_law_is_continued_from_the_probe_by_what_a_run_keeps_of_its_slope(tmp_path):
    told, _ = quote(tmp_path, raced())
    end = 1000 + STEP + 2000 + 90_000  # the warm-up, the probe and all that may be spent
    kept = KEPT * 0.3 * math.log(end / 3100)
    assert told.offer("random").loss.expected == pytest.approx(law(3100) - kept, rel=1e-6)
    assert told.offer("bm25").loss.expected == pytest.approx(law(3100) - 0.1 - kept, rel=1e-6)


def test_a_run_is_told_to_spend_what_was_spent_before_and_all_that_may_be_spent(tmp_path):
    told, hours = quote(tmp_path, raced(price_flops=1000))
    for name in ("random", "bm25"):
        assert told.offer(name).flops.high == SPENT - 0 + 90_000
        assert told.offer(name).flops.low <= told.offer(name).flops.expected <= told.offer(name).flops.high
    assert hours.watts == 3.0
    assert hours.basis == "modelled"  # no timing lies beside these curves


def test_what_was_weighed_to_pay_is_best_and_what_a_run_takes_is_told_apart(tmp_path):
    sure, _ = quote(tmp_path / "sure", raced(gain=0.1, gain_low=0.05, gain_high=0.2, probability=0.95))
    unsure, _ = quote(
        tmp_path / "unsure", raced("random", gain=0.1, gain_low=-0.1, gain_high=0.2, probability=0.6), follow="bm25"
    )
    assert (sure.best, sure.follows) == ("bm25", "random")
    assert (unsure.best, unsure.follows) == ("random", "bm25")
    assert unsure.stops[-1].share == 1.0
    assert 0 < unsure.stop_share <= 1


def test_without_any_training_words_tell_the_probability_and_the_rest_is_said_not_to_be_known(tmp_path):
    likeness = Likeness(chosen=0.9, pool=0.1, moved=0.8, low=0.7, high=0.9, reference_rows=24)
    told, hours = quote(tmp_path, likeness=likeness, trained=False)
    assert told.offer("bm25").basis == "words"
    assert told.offer("bm25").probability.expected == pytest.approx(27.5 / 37, abs=1e-6)
    assert told.offer("bm25").loss is None
    assert told.best == "bm25"
    assert "nothing was trained" in told.unknown[0]
    rate = hours.seconds_a_flop
    assert rate.expected == pytest.approx(1 / (2.0 * PRICED.flops_per_token))
    assert rate.high / rate.expected == pytest.approx(MODEL_OFF)


def visits(fraction, passes):
    """Return what passes over a share are worth (Muennighoff et al. 2023, equation 5), in passes over fresh rows."""
    again = passes / fraction - 1
    return fraction + fraction * 15.387756 * (1 - math.exp(-again / 15.387756))


def test_the_joint_plan_crosses_choosing_shares_ways_and_ends_and_no_untried_loss_is_told_or_ranked(tmp_path):
    told, hours = quote(tmp_path, raced(gain=0.1, gain_low=0.05, gain_high=0.2, probability=0.95))
    known = [row for row in told.joint if row.loss]
    found = {(row.arm, row.fraction, row.way, row.share) for row in known}
    assert all(
        (arm, fraction, f"full, float32, micro-batch {size}", share) in found
        for arm in ("random", "bm25")
        for fraction in (0.1, 0.05)  # all FLOPs visit a tenth nine times: the offer's, and half of it
        for size in (4, 2)  # steps of eight rows both
        for share in (0.5, 1.0)
    ), found
    assert {row.fraction for row in known if row.arm == "random"} == {0.05, 0.1, 0.2}  # rows by chance are alike
    assert len(found) == len(known)
    assert told.joint.index(known[-1]) == len(known) - 1, "an unknown loss is ranked"
    why = {(row.way.split(",")[0], row.unknown) for row in told.joint if row.loss is None}
    assert ("lora", "the probes trained full") in why
    assert ("full", "the probes made steps of 8 rows, not 9") in why
    assert ("full", "its further rows were not tried") in why
    assert not any("micro-batch 8" in row.way for row in told.joint)  # does not fit
    assert [row.flops_known for row in known] == [True] * len(known)
    assert (known[0].arm, known[0].fraction, known[0].way) == ("bm25", 0.1, "full, float32, micro-batch 4")
    assert known[0].loss.expected <= min(row.loss.expected for row in known) + 0.005  # of `gain_left`
    assert told.combinations >= len(told.joint) == len(hours.joint)


def test_less_of_the_pool_costs_what_the_law_of_repetition_says_and_its_interval_holds_the_share_that_was_tried(
    tmp_path,
):
    told, _ = quote(tmp_path, raced())
    rows = {(row.arm, row.fraction, row.way, row.share): row for row in told.joint}
    whole, half = (rows["bm25", fraction, "full, float32, micro-batch 4", 1.0] for fraction in (0.1, 0.05))
    training = 2000 + 90_000
    worth = visits(0.05, training / 10**5) / visits(0.1, training / 10**5)
    fold = KEPT * 0.3 * math.log((1000 + STEP + training * worth) / 3100)
    assert half.loss.expected == pytest.approx(law(3100) - 0.1 - fold, rel=1e-6)
    assert half.loss.low == whole.loss.low
    assert half.loss.high > whole.loss.high
    assert whole.loss == told.offer("bm25").loss


def test_under_a_limit_in_seconds_a_slower_way_trains_less(tmp_path):
    fixed = {"method": "fixed_rounds"}
    told, hours = quote(tmp_path, raced(), binding="seconds", policy=fixed)
    fast, slow = (
        next(
            (place, row)
            for place, row in enumerate(told.joint)
            if (row.arm, row.fraction, row.share) == ("random", 0.1, 1.0) and f"micro-batch {size}" in row.way
        )
        for size in (4, 2)
    )
    kept = KEPT * 0.3 * math.log((1000 + STEP + 2000 + 45_000) / 3100)
    assert slow[1].loss.expected == pytest.approx(law(3100) - kept, rel=1e-6)
    assert slow[1].loss.expected > fast[1].loss.expected
    trained = [hours.joint[place]["train"].expected for place, _ in (fast, slow)]
    assert trained[1] == pytest.approx(trained[0], rel=1e-6)


def test_losses_within_what_a_policy_ignores_count_as_equal_and_the_quicker_goes_first():
    def row(loss, flops, speed=1.0):
        spans = [None if value is None else Span(expected=value, low=value, high=value) for value in (loss, flops)]
        return JointOffer(
            arm=str(loss), fraction=1, way="", speed=speed, share=1, loss=spans[0], flops=spans[1], flops_known=True
        )

    rows = [row(None, 1), row(2.0, 100), row(2.02, 50, 0.25), row(2.015, 50), row(2.1, 1), row(2.021, 1)]
    assert [item.arm for item in ranked(rows, 0.02)] == ["2.015", "2.0", "2.02", "2.021", "2.1", "None"]
    assert [item.arm for item in ranked(rows, 0.0)] == ["2.0", "2.015", "2.02", "2.021", "2.1", "None"]


def test_an_end_is_quoted_with_what_a_policy_may_leave_and_the_last_is_the_offers_own(tmp_path):
    told, _ = quote(tmp_path, raced())
    assert told.stops[-1].flops == told.offer(told.best).flops
    assert all(stop.flops.low < stop.flops.expected <= stop.flops.high for stop in told.stops)
    assert [stop.flops.high for stop in told.stops] == pytest.approx(
        [SPENT + 2000 + stop.share * 90_000 - 2000 for stop in told.stops], abs=1
    )


def test_seconds_by_stage_add_up_and_a_way_twice_as_slow_trains_twice_as_long(tmp_path):
    _, hours = quote(tmp_path, raced(price_flops=30_000), policy={"method": "fixed_rounds"})
    of = hours.stages["bm25"]
    assert summed(of.values()).expected == pytest.approx(hours.seconds["bm25"].expected)
    assert of["begin"].low == of["begin"].high == 17.0  # is spent
    rate = hours.seconds_a_flop.expected * KEEPING.expected
    assert of["score"].expected == pytest.approx(30_000 * rate)
    assert of["train"].expected == pytest.approx(60_000 * rate)
    slower = hours.ways["full, float32, micro-batch 2"].expected - hours.ways["full, float32, micro-batch 4"].expected
    assert slower == pytest.approx(of["train"].expected)


def test_the_rate_is_that_of_all_steps_and_its_interval_that_of_blocks_of_them():
    steps = np.arange(1, 17)
    flops = pa.table({"step": steps, "flops": steps * 10})
    took = np.where(steps <= 8, 1.0, 3.0)
    timing = pa.table({"step": np.r_[steps, 16], "seconds": np.r_[took, 0.0]})
    found = block_rates([(flops, timing)])  # eight blocks of two steps: four at 0.1 s a FLOP, four at 0.3
    assert found.expected == pytest.approx((8 * 1 + 8 * 3) / 160)
    assert (found.low, found.high) == pytest.approx((0.1, 0.3))
    assert block_rates([]) is None
