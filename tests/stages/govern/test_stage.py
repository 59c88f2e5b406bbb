"""The govern stage on curves and ledgers written by hand."""

from __future__ import annotations

import pytest

from data_contracts.cost import Cost
from data_contracts.errors import ArtifactError
from data_contracts.ledger import Entry, Ledger
from data_contracts.records import Decision, MemoryUse, Plan, Ref, Weighing
from stages.govern.stage import STAGE, GovernSlice
from stages.stage import Artifact, Inputs
from tests.local_work import work_for
from tests.stages.governor.test_drift import scores
from tests.stages.governor.test_policies import FLOPS, segment

PLAN = Plan(
    technique={"method": "full"},
    precision="float32",
    micro_batch=1,
    accumulation=1,
    packed=False,
    row_tokens=8,
    trainable=1,
    peak_bytes=1,
    phases={},
    flops_per_token=6,
    flops_per_token_forward=2,
    pass_flops=40 * FLOPS,
    why="",
)


def row(item):
    unknown = dict.fromkeys(("gradient_norm", "gradient_noise", "update_ratio", "promised_loss"))
    guard = {"guard": "off", "guard_scale": 1.0, "guard_action": ""}
    return {**unknown, **guard, "epoch": 1.0, "learning_rate": 1e-3, **item}


def ledger(**flops):
    costs = {cause: Cost(flops=value, tokens=value // 10**9, seconds=value / FLOPS) for cause, value in flops.items()}
    stages = {"warm_up": "begin"}
    return Ledger.fold(
        [Entry(f"i{cause}", f"r{cause}", stages.get(cause, cause), {cause: cost}) for cause, cost in costs.items()]
    )


def govern(
    tmp_path,
    segments,
    previous=None,
    spent=None,
    budget=None,
    beside=None,
    tables=None,
    train=None,
    plan=None,
    also=(),
    notices=None,
    **settings,
):
    """Run the stage; return its decision and its summary. `beside` may put files beside the curves; `tables` are further
    inputs: name to (contract, tables); `train` are settings, `plan` fields of the plan in force, `also`
    names of what `beside` made that is given too; `notices` is filled with what the user is told."""
    maker = work_for(STAGE, tmp_path / "made")
    maker.gives = {f"curve{i}": "curve" for i in range(len(segments))} | {"plan": "plan", "decision": "decision"}
    for i, rows in enumerate(segments):
        with maker.writer(f"curve{i}", extra="retention_loss" in rows[0]) as writer:
            writer.extend({k: [row(r)[k] for r in rows] for k in row(rows[0])})
    if beside:
        beside(maker)
    maker.record("plan", PLAN.model_copy(update=plan or {}))
    given = {
        "curve": [maker.artifact(f"curve{i}") for i in range(len(segments))],
        "checkpoint": [
            Artifact(Ref(contract="checkpoint/1", run=f"run{i}", path="checkpoint", digest=str(i) * 64), tmp_path)
            for i in range(len(segments))
        ],
        "plan": [maker.artifact("plan")],
    }
    if previous is not None:
        maker.record("decision", previous)
        given["decision"] = [maker.artifact("decision")]
    for name, (contract, several) in (tables or {}).items():
        maker.gives |= {f"{name}{i}": contract for i in range(len(several))}
        for i, table in enumerate(several):
            maker.table(f"{name}{i}", table)
        given[name] = [maker.artifact(f"{name}{i}") for i in range(len(several))]
    given |= {name: [maker.artifact(name)] for name in also}
    work = work_for(STAGE, tmp_path / "work", ledger=spent or ledger(warm_up=2 * FLOPS))
    config = GovernSlice(
        budget={"flops": 100 * FLOPS} if budget is None else budget, govern=settings, train=train or {}
    )
    summary = STAGE.run(config, Inputs(given), work)
    if notices is not None:
        notices += work.notices
    return work.artifact("decision").record(Decision), summary


WARMUP = segment([4.0, 3.5], phase="warmup")
PATIENT = {"method": "patience", "patience": 100}
GOOD = segment([3.0, 2.6, 2.3, 2.1], start=20)


def test_the_first_decision_plans_and_chooses_and_shares_the_budget(tmp_path):
    decision, _ = govern(tmp_path, [WARMUP])
    assert (decision.action, decision.round, decision.replans) == ("reselect", 0, True)
    # 100 − 2 spent − 5 % kept for evaluation − one pass over the pool; 3 rounds
    assert decision.segment_flops == (98 - 5 - 40) * FLOPS // 3
    assert decision.remaining.flops == 98 * FLOPS
    assert (decision.best, decision.best_step, decision.best_loss) == ("0" * 64, 20, 3.5)


def test_a_re_selection_is_charged_what_the_last_one_cost(tmp_path):
    first, _ = govern(tmp_path / "a", [WARMUP])
    spent = ledger(warm_up=2 * FLOPS, score=3 * FLOPS, train=4 * FLOPS)
    flat = segment([2.5, 2.1, 2.1, 2.1, 2.1, 2.1, 2.1], start=20)
    decision, summary = govern(tmp_path / "b", [WARMUP, flat], first, spent)
    assert decision.action == "reselect"
    assert decision.numbers["reselect_flops"] == 3 * FLOPS
    assert decision.segment_flops == (91 - 5 - 3) * FLOPS // 2
    assert decision.numbers["segment_1_action"] == "reselect"
    assert not decision.replans
    assert decision.best == "1" * 64
    assert summary.tables[0].rows[1][:3] == (1, "reselect", 7 * FLOPS)


def test_no_re_selection_is_offered_that_would_take_more_than_half_of_what_is_left(tmp_path):
    first, _ = govern(tmp_path / "a", [WARMUP], policy=PATIENT)
    flat = segment([2.5, 2.1, 2.1], start=20)
    spent = ledger(warm_up=2 * FLOPS, score=48 * FLOPS, train=3 * FLOPS)
    dear, _ = govern(tmp_path / "b", [WARMUP, flat], first, spent, policy=PATIENT)
    assert dear.action == "continue"  # 47 minus 5 are left, choosing cost 48
    assert dear.segment_flops == (47 - 5) * FLOPS // 2
    cheap, _ = govern(
        tmp_path / "c", [WARMUP, flat], first, ledger(warm_up=2 * FLOPS, score=20 * FLOPS), policy=PATIENT
    )
    assert cheap.action == "reselect"


def test_a_step_is_told_apart_from_the_dearest_which_was_evaluated(tmp_path):
    steps = [{**row_, "flops": flops * FLOPS} for row_, flops in zip(segment([4.0] * 5), (1, 2, 3, 7, 8), strict=True)]
    decision, _ = govern(tmp_path, [steps])
    assert (decision.numbers["step_flops"], decision.numbers["least_segment_flops"]) == (FLOPS, 8 * FLOPS)


def test_the_last_round_anneals_and_then_the_run_stops(tmp_path):
    first, _ = govern(tmp_path / "a", [WARMUP], rounds=2)
    spent = ledger(warm_up=2 * FLOPS, score=FLOPS, train=4 * FLOPS)
    second, _ = govern(tmp_path / "b", [WARMUP, GOOD], first, spent, rounds=2)
    assert second.action == "anneal"
    assert "last round" in second.reason
    end = segment([2.0, 1.9], phase="decay", start=60)
    third, _ = govern(tmp_path / "c", [WARMUP, GOOD, end], second, spent, rounds=2)
    assert third.stops
    assert third.best_loss == 1.9
    assert third.segment_flops is None


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_policy_that_has_seen_enough_closes_with_a_decay_alone_whatever_rounds_are_left(tmp_path, rounds):
    first, _ = govern(tmp_path / "a", [WARMUP], rounds=rounds, policy=PATIENT)
    spent = ledger(warm_up=2 * FLOPS, train=40 * FLOPS)
    worse = segment([2.0] + [2.1] * 38, start=20)
    wants_more, _ = govern(tmp_path / "b", [WARMUP, worse], first, spent, rounds=rounds, policy=PATIENT)
    assert not wants_more.closes
    impatient = {"method": "patience", "patience": 3}
    closing, _ = govern(tmp_path / "c", [WARMUP, worse], first, spent, rounds=rounds, policy=impatient)
    assert (closing.action, closing.closes) == ("anneal", True)
    assert closing.segment_flops == 15 * (len(WARMUP) + len(worse)) * FLOPS // 100
    unlimited, _ = govern(tmp_path / "d", [WARMUP, worse], first, spent, {}, rounds=rounds, policy=impatient)
    assert unlimited.segment_flops == closing.segment_flops
    late = ledger(warm_up=2 * FLOPS, train=90 * FLOPS)
    short, _ = govern(tmp_path / "e", [WARMUP, worse], first, late, rounds=rounds, policy=impatient)
    assert short.segment_flops == (100 - 92 - 5) * FLOPS  # no more than is left


def test_a_segment_that_got_worse_leaves_the_best_checkpoint_with_the_one_before(tmp_path):
    first, _ = govern(tmp_path / "a", [WARMUP])
    decision, _ = govern(tmp_path / "b", [WARMUP, segment([3.6, 3.9, 4.4, 5.0], start=20)], first)
    assert decision.stops
    assert (decision.best, decision.best_loss) == ("0" * 64, 3.5)


def test_a_loss_that_is_not_finite_stops_the_run_and_is_listed(tmp_path):
    first, _ = govern(tmp_path / "a", [WARMUP])
    decision, summary = govern(tmp_path / "b", [WARMUP, segment([3.0, float("nan")], start=20)], first)
    assert decision.stops
    assert decision.non_finite_steps == (40,)
    assert (decision.best, decision.best_loss) == ("1" * 64, 3.0)
    assert summary.facts["steps with a non-finite loss"] == "40"


def test_a_budget_that_the_warm_up_used_up_stops_with_the_reason(tmp_path):
    decision, _ = govern(tmp_path, [WARMUP], budget={"flops": 2 * FLOPS})
    assert decision.stops
    assert "budget is used up" in decision.reason
    assert not decision.replans


def test_what_is_weighed_is_no_longer_than_a_pass_over_the_selection(tmp_path):
    first, _ = govern(tmp_path / "a", [WARMUP])
    decision, _ = govern(tmp_path / "b", [WARMUP, GOOD], first, ledger(warm_up=2 * FLOPS, score=FLOPS, train=4 * FLOPS))
    assert decision.segment_flops > 4 * FLOPS
    assert decision.numbers["horizon_flops"] == 4 * FLOPS


def test_no_round_is_promised_that_the_budget_cannot_pay(tmp_path):
    first, _ = govern(tmp_path / "a", [WARMUP], evaluation_share=0.0, rounds=9)
    # a step with its evaluation costs 1, a segment at least 2; 5 are left: two rounds, not eight
    decision, _ = govern(
        tmp_path / "b",
        [WARMUP, GOOD],
        first,
        ledger(warm_up=2 * FLOPS, train=4 * FLOPS),
        budget={"flops": 11 * FLOPS},
        evaluation_share=0.0,
        rounds=9,
    )
    assert decision.numbers["rounds_left"] == 2
    assert not decision.stops
    last, _ = govern(
        tmp_path / "c",
        [WARMUP, GOOD],
        first,
        ledger(warm_up=2 * FLOPS, train=4 * FLOPS),
        budget={"flops": 7 * FLOPS},
        evaluation_share=0.0,
        rounds=9,
    )
    assert last.stops
    assert "less is left than a step" in last.reason


def test_token_and_time_limits_become_flops_at_the_rate_of_training(tmp_path):
    tokens, _ = govern(tmp_path / "a", [WARMUP], budget={"tokens": 8 * FLOPS // 10**9}, evaluation_share=0.0)
    assert tokens.numbers["spendable_flops"] == 6 * FLOPS
    seconds, _ = govern(tmp_path / "b", [WARMUP], budget={"seconds": 5.0}, evaluation_share=0.0)
    assert seconds.numbers["spendable_flops"] == 3 * FLOPS
    price = {"hour": 360.0, "stages": {"begin": 720.0}}  # 0.2 a second of begin: the warm-up's 2 s took 0.4 of 1.0
    money, summary = govern(tmp_path / "c", [WARMUP], budget={"money": 1.0, "price": price}, evaluation_share=0.0)
    assert money.numbers["spendable_flops"] == pytest.approx(3 * FLOPS)
    assert money.remaining.money == pytest.approx(0.6)
    assert (money.numbers["binding"], summary.facts["what binds"]) == ("money", "money")
    both = {"money": 1.0, "price": price, "flops": 3 * FLOPS}
    scarce, _ = govern(tmp_path / "d", [WARMUP], budget=both, evaluation_share=0.0)
    assert (scarce.numbers["binding"], scarce.numbers["spendable_flops"]) == ("flops", FLOPS)


@pytest.mark.parametrize(
    "budget", [{"seconds": 1e308}, {"money": 1e308, "price": {"hour": 1}}, {"money": 1.0, "price": {"hour": 1e-320}}]
)
def test_a_limit_that_is_worth_more_flops_than_there_are_numbers_limits_nothing(tmp_path, budget):
    decision, _ = govern(tmp_path, [WARMUP], budget=budget)
    assert (decision.numbers["spendable_flops"], decision.numbers["binding"]) == (None, None)


def test_without_limits_rounds_alone_end_the_run(tmp_path):
    decision, _ = govern(tmp_path, [WARMUP], budget={})
    assert decision.action == "reselect"
    assert decision.segment_flops is None


def test_equal_curves_and_flops_give_equal_decisions_whatever_the_clock_says(tmp_path):
    slow = Ledger.fold([Entry("i", "r", "s", {"warm_up": Cost(flops=2 * FLOPS, tokens=2000, seconds=1e6)})])
    fast = Ledger.fold([Entry("i", "r", "s", {"warm_up": Cost(flops=2 * FLOPS, tokens=2000, seconds=1e-3)})])
    assert govern(tmp_path / "a", [WARMUP], spent=slow)[0] == govern(tmp_path / "b", [WARMUP], spent=fast)[0]


def test_curves_that_do_not_follow_the_previous_decision_are_refused(tmp_path):
    with pytest.raises(ArtifactError, match="2 curve"):
        govern(tmp_path, [WARMUP, GOOD])


def test_scorings_that_disagree_are_answered_by_one_re_selection_and_the_next_is_the_policys(tmp_path):
    first, _ = govern(tmp_path / "a", [WARMUP])
    rising, falling = [[float(i)] for i in range(40)], [[float(-i)] for i in range(40)]
    pair = {
        "earlier_scores": ("scores", [scores(range(40), rising)]),
        "scores": ("scores", [scores(range(40), falling)]),
    }
    steep = segment([3.0, 2.7, 2.5, 2.35, 2.25, 2.2, 2.17], start=20)
    spent = ledger(warm_up=2 * FLOPS, score=20 * FLOPS, train=7 * FLOPS)
    plain, _ = govern(tmp_path / "b", [WARMUP, steep], first, spent, policy={"method": "marginal_gain"})
    assert plain.action == "continue"
    moved, summary = govern(
        tmp_path / "c", [WARMUP, steep], first, spent, policy={"method": "marginal_gain"}, tables=pair
    )
    assert moved.action == "reselect"
    assert (moved.numbers["ranking_agreement"], moved.numbers["ranking_rows"]) == (-1.0, 40)
    assert "the ranking has moved" in summary.facts["reason"]
    more = segment([2.1, 2.0, 1.92, 1.86, 1.82, 1.8, 1.79], start=90)
    spent = ledger(warm_up=2 * FLOPS, score=30 * FLOPS, train=14 * FLOPS)
    rule = {"method": "marginal_gain"}
    after, _ = govern(tmp_path / "d", [WARMUP, steep, more], moved, spent, policy=rule, rounds=9, tables=pair)
    assert "ranking has moved" not in after.reason
    assert after.numbers["ranking_agreement"] == -1.0


def test_another_target_than_that_of_the_latest_selection_is_said_and_counted(tmp_path):
    def tokens(ids):
        named = [f"{index:06d}" for index in ids]
        rows = {"example_id": named, "source": ["s"] * len(ids), "input_ids": [[1, 2]] * len(ids)}
        counts = {"n_tokens": [2] * len(ids), "n_answer_tokens": [1] * len(ids), "truncated": [False] * len(ids)}
        return rows | {"answer_mask": [[False, True]] * len(ids)} | counts

    targets = {
        "target_tokens": ("tokens", [tokens(range(4))]),
        "earlier_target": ("tokens", [tokens(range(3, 9))]),
    }
    decision, _ = govern(tmp_path, [WARMUP], tables=targets)
    assert decision.action == "reselect"
    assert "25% of its rows are the same" in decision.reason
    assert decision.numbers["target_rows_shared"] == 0.25


STEEP = segment([3.0, 2.7, 2.5, 2.35, 2.25, 2.2, 2.17], start=20)
DEAR = ledger(warm_up=2 * FLOPS, score=48 * FLOPS, train=7 * FLOPS)
"""Choosing anew is not offered."""
WIDE = {"window": 64, "micro_batch": 8, "accumulation": 8, "answer_tokens": 10.0}
NOISY = [{**item, "gradient_noise": 160.0} for item in STEEP]
"""Of 16 examples; the plan in force has 64."""


def test_where_other_workers_or_memory_may_be_used_what_is_done_next_is_done_under_a_new_plan(tmp_path):
    first, _ = govern(tmp_path / "a", [WARMUP], policy=PATIENT)
    given = {"policy": PATIENT, "train": {"workers": 2}}
    on, summary = govern(tmp_path / "b", [WARMUP, STEEP], first, DEAR, **given)
    assert (on.action, on.replans) == ("reallocate", True)
    assert summary.facts["reason"].endswith("; under a new plan: 2 worker(s) may be used, not 0")
    assert on.numbers["new_plan"] == "2 worker(s) may be used, not 0"
    cheap = ledger(warm_up=2 * FLOPS, score=FLOPS, train=7 * FLOPS)
    chosen, _ = govern(tmp_path / "c", [WARMUP, STEEP], first, cheap, **given)
    assert (chosen.action, chosen.replans) == ("reselect", True)
    last, _ = govern(tmp_path / "d", [WARMUP, STEEP], first, cheap, rounds=2, **given)
    assert (last.action, last.replans) == ("anneal", True)
    over, _ = govern(tmp_path / "e", [WARMUP, STEEP], first, cheap, rounds=1, **given)
    assert (over.action, over.replans) == ("stop", False)
    less, _ = govern(
        tmp_path / "f", [WARMUP, STEEP], first, DEAR, budget={"flops": 100 * FLOPS, "peak_bytes": 10**9}, policy=PATIENT
    )
    assert less.reason.endswith("; under a new plan: 1,000,000,000 bytes may be held, not any memory")
    same, _ = govern(tmp_path / "g", [WARMUP, STEEP], first, DEAR, plan={"workers": 2}, **given)
    assert (same.action, same.replans) == ("continue", False)


def test_a_new_plan_is_made_after_memory_ran_out_and_not_twice_in_a_row(tmp_path):
    use = MemoryUse(device="cpu", predicted_bytes=1, allowed_bytes=None, measured_bytes=2, ran_out=True)

    def beside(maker):
        for name in [name for name in maker.gives if name.startswith("curve")]:
            maker.measured(name, "memory.json").write_text(use.model_dump_json())

    first, _ = govern(tmp_path / "a", [WARMUP], policy=PATIENT)
    on, _ = govern(tmp_path / "b", [WARMUP, STEEP], first, DEAR, policy=PATIENT, beside=beside)
    assert (on.action, on.replans) == ("reallocate", True)
    assert "; under a new plan: memory ran out in the latest segment" in on.reason
    more = segment([2.1, 2.0, 1.92, 1.86, 1.82, 1.8, 1.79], start=90)
    after, _ = govern(tmp_path / "c", [WARMUP, STEEP, more], on, DEAR, policy=PATIENT, beside=beside, rounds=9)
    assert (after.action, after.replans) == ("continue", False)
    assert after.numbers["segment_2_action"] == "reallocate"


def test_a_batch_far_above_the_noise_scale_is_reallocated_where_that_pays(tmp_path):
    first, _ = govern(tmp_path / "a", [WARMUP], policy=PATIENT)
    given = {"policy": PATIENT, "plan": WIDE}
    on, _ = govern(tmp_path / "b", [WARMUP, NOISY], first, DEAR, **given)
    assert (on.action, on.replans) == ("reallocate", True)
    assert on.numbers["new_plan_speed_up"] == pytest.approx((1 + 640 / 160) / (1 + 160 / 160))
    never, _ = govern(tmp_path / "c", [WARMUP, NOISY], first, DEAR, hysteresis=1.5, **given)
    assert (never.action, never.replans) == ("continue", False)
    quiet, _ = govern(tmp_path / "d", [WARMUP, STEEP], first, DEAR, **given)
    assert quiet.action == "continue"


def test_a_remix_is_offered_where_a_mixture_follows_training_and_charged_what_it_cost(tmp_path):
    mixture = {"part": ["a"], "rows": [1], "tokens": [1], "prior": [1.0], "share": [1.0], "phase": [0], "replay": [0.0]}
    tables = {"mixture": ("mixture", [{**mixture, "state": [None]}])}
    spent = Ledger.fold(
        [
            Entry("i", "r", "begin", {"warm_up": Cost(flops=2 * FLOPS)}),
            Entry("j", "s", "mix", {"probe": Cost(flops=3 * FLOPS)}),
            Entry("k", "t", "score", {"score": Cost(flops=20 * FLOPS)}),
            Entry("l", "u", "train", {"train": Cost(flops=7 * FLOPS)}),
        ]
    )
    first, _ = govern(tmp_path / "a", [WARMUP])
    plain, _ = govern(tmp_path / "b", [WARMUP, STEEP], first, spent)
    assert (plain.action, plain.numbers["reselect_flops"]) == ("reselect", 23 * FLOPS)
    mixed, _ = govern(tmp_path / "c", [WARMUP, STEEP], first, spent, tables=tables)
    assert (mixed.action, mixed.reselects, mixed.rescores) == ("remix", True, False)
    assert mixed.numbers["choosing_expected_flops"] == 3 * FLOPS
    assert mixed.segment_flops == (100 - 32 - 5 - 3) * FLOPS // 2


def test_what_training_scored_and_ways_that_were_tried_in_vain_are_no_price_of_choosing_anew(tmp_path):
    first, _ = govern(tmp_path / "a", [WARMUP])
    causes = {"train": Cost(flops=6 * FLOPS), "score": Cost(flops=30 * FLOPS)}  # a batch selector looks
    entries = [Entry("i", "r", "begin", {"warm_up": Cost(flops=2 * FLOPS)}), Entry("k", "t", "train", causes)]
    spent = Ledger.fold([*entries, Entry("l", "u", "score", {"score": Cost(flops=FLOPS)})])
    looked, _ = govern(tmp_path / "b", [WARMUP, STEEP], first, spent)
    assert looked.numbers["reselect_flops"] == FLOPS
    spent = Ledger.fold([*entries, Entry("l", "u", "score", {"score": Cost(flops=9 * FLOPS)})])

    def beside(maker):
        arm = {"fraction": 0.1, "spent_flops": 1, "probe_flops": 1, "probe_loss": 2.0, "probe_se": 0.1}
        arm |= {"training_flops": 1, "expected_loss": 2.0, "low": 1.0, "high": 3.0, "gain": 0.0, "gain_low": 0.0}
        arm |= {"gain_high": 0.0, "probability": 0.5}
        arms = [{**arm, "name": name, "price_flops": price * FLOPS} for name, price in (("random", 0), ("bm25", 4))]
        maker.gives |= {"weighing": "weighing"}
        maker.record(
            "weighing", Weighing(chosen="bm25", reason="", start_loss=3.0, spendable_flops=1, arms=tuple(arms))
        )

    raced, _ = govern(tmp_path / "c", [WARMUP, STEEP], first, spent, beside=beside, also=("weighing",))
    assert (raced.numbers["reselect_flops"], raced.numbers["tried_flops"]) == (4 * FLOPS, 5 * FLOPS)
    later, _ = govern(
        tmp_path / "d", [WARMUP, STEEP, segment([2.1, 2.0, 1.92, 1.86, 1.82, 1.8, 1.79], start=90)], raced, spent
    )
    assert (later.numbers["reselect_flops"], later.numbers["tried_flops"]) == (2 * FLOPS, 5 * FLOPS)
