"""The guard's decisions, by hand, and what they do inside a segment."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
import torch

from data_contracts.config import GovernConfig, GuardConfig, TrainConfig
from stages.model.checkpoint import load_merged
from stages.train import loop
from stages.train.beginning import Beginning
from stages.train.guard import Guard, Seen, handed_on
from stages.train.guarding import Guarding
from stages.train.position import Position
from stages.train.schedule import Schedule
from stages.train.snapshot import Snapshots
from stages.train.stage import STAGE, TrainSlice
from tests.local_work import work_for
from tests.stages.train.small import House

CLIP = 1.0


def healthy(count: int, seed: int = 0, level: float = 3.0) -> list[Seen]:
    """Return windows whose loss falls slowly under noise, with heavy-tailed norms."""
    rng = np.random.default_rng(seed)
    return [
        Seen(
            level + 0.8 * math.exp(-step / 30) + 0.2 * float(rng.standard_normal()),
            0.15,
            3 * math.exp(0.4 * float(rng.standard_normal())),
            2e-3,
            0.2,
        )
        for step in range(count)
    ]


def settled(guard: Guard) -> Guard:
    """Let a guard see a healthy start; its state of step 0 was kept."""
    guard.keep(0)
    for seen in healthy(20):
        assert guard.see(seen) is None
    return guard


def test_a_healthy_run_is_given_the_configurations_own_limits_throughout():
    for seed in range(20):
        guard = Guard(GuardConfig(), CLIP)
        for seen in healthy(300, seed):
            limits = guard.limits()
            assert (limits.scale, limits.clip) == (1.0, CLIP)
            assert seen.loss < limits.loss
            assert seen.norm < limits.norm
            assert guard.see(seen) is None


def test_one_window_far_out_is_skipped_and_costs_no_rate():
    guard = settled(Guard(GuardConfig(), CLIP))
    usual = statistics.median(guard.norms)
    assert guard.limits().norm == 10 * usual
    assert guard.see(Seen(3.0, 0.15, 11 * usual)) is None
    assert (guard.regime, guard.scale) == ("stress", 1.0)
    assert guard.limits().clip == min(CLIP, usual) / 2
    for seen in healthy(5):
        guard.see(Seen(3.2, 0.15, seen.norm, 2e-3, 0.2))
    assert guard.regime == "stable"
    assert guard.limits().clip == CLIP


def test_an_alarm_that_lasts_is_the_weights_and_the_newest_state_that_was_no_worse_is_put_back():
    guard = settled(Guard(GuardConfig(states=3), CLIP))
    assert guard.keep(20)
    guard.states.append((25, 9.0, 0))  # one that was worse
    assert guard.see(Seen(8.0, 0.15, 3.0)) is None
    assert guard.scale == 1.0
    assert guard.see(Seen(8.0, 0.15, 3.0)) == 20
    assert (guard.regime, guard.scale, guard.ceiling) == ("recover", 0.5, 0.5)
    assert [step for step, *_ in guard.states] == [0, 20]
    assert guard.limits().loss == math.inf  # what is usual is learnt anew
    for used in range(2):
        guard.see(Seen(3.2, 0.15, 3.0))
        assert [guard.see(Seen(8.0 + used, 0.15, 3.0)) for _ in range(2)] == [None, 20]
    guard.see(Seen(3.2, 0.15, 3.0))
    assert [guard.see(Seen(9.0, 0.15, 3.0)) for _ in range(2)] == [None, 0]  # three times were enough
    assert guard.scale == guard.ceiling == 0.1


def test_losses_that_are_not_finite_are_gone_back_from_whatever_they_were():
    guard = settled(Guard(GuardConfig(), CLIP))
    assert [guard.see(Seen(math.nan, None, math.nan)) for _ in range(2)] == [None, 0]


def test_an_update_that_promises_more_loss_than_there_is_bounds_the_rate_for_good():
    guard = settled(Guard(GuardConfig(wait_windows=50), CLIP))
    assert guard.see(Seen(3.0, 0.15, 3.0, 0.02, 6.0)) is None  # twice the loss
    assert (guard.scale, guard.ceiling) == (0.5, 0.125)
    scales = []
    for _ in range(40):
        guard.see(Seen(3.0, 0.15, 3.0, 1e-3, 0.1))
        scales.append(guard.scale)
    assert scales[:2] == [0.25, 0.125]
    assert set(scales[2:]) == {0.125}
    for _ in range(30):
        guard.see(Seen(3.0, 0.15, 3.0, 1e-3, 0.1))
    assert guard.ceiling == guard.scale == 0.25
    assert guard.regime == "recover"
    assert handed_on(guard.state()) == {"regime": "recover", "scale": 0.25, "ceiling": 0.25, "wait": 50}


def test_an_update_that_overshot_is_taken_back_at_once_where_nothing_is_lost_by_it():
    guard = Guard(GuardConfig(), CLIP)
    guard.keep(0)
    assert guard.see(Seen(3.0, 0.15, 3.0, 0.02, 6.0)) == 0
    assert (guard.scale, guard.ceiling, guard.regime) == (0.125, 0.125, "recover")
    assert settled(Guard(GuardConfig(), CLIP)).see(Seen(3.0, 0.15, 3.0, 0.02, 6.0)) is None  # it was worse at step 0


def test_where_even_the_least_rate_promises_too_much_a_decay_that_is_due_begins_at_once(tmp_path):
    guard = Guard(GuardConfig(wait_windows=10), CLIP)
    guard.keep(0)
    assert guard.see(Seen(3.0, 0.15, 3.0, 0.02, 18.0)) == 0  # six times the loss, of which a quarter is sought
    assert (guard.scale, guard.ceiling, guard.floored) == (0.1, 0.1, True)
    assert handed_on(guard.state())["floored"]
    planned, stable = Schedule(1.0, 4, "linear").annealing(0, 20, 0.3), Schedule(1.0, 4, "linear")
    snapshots = Snapshots(tmp_path, "digest")
    guarding = Guarding(TrainConfig(), Position(20, {}, step=3, guard=guard.state()), snapshots, 0)
    sooner = guarding.sooner(planned)
    assert (sooner.decay_from, sooner.decay_steps) == (3, 17)
    assert guarding.sooner(sooner) is sooner
    assert guarding.sooner(stable) is stable  # a segment that keeps its rate keeps it
    assert Guarding(TrainConfig(), Position(20, {}, step=3), snapshots, 0).sooner(planned) is planned
    for _ in range(12):
        guard.see(Seen(3.0, 0.15, 3.0, 1e-3, 0.1))
    assert (guard.ceiling, guard.floored) == (0.2, False)


def test_below_a_nat_it_is_a_nat_that_must_not_be_promised():
    assert Seen(0.01, None, 0.1, 1e-3, 0.5).promise == 0.5
    assert Seen(4.0, None, 0.1, 1e-3, 1.0).promise == 0.25


def test_rows_that_stand_out_of_what_is_learnt_by_heart_and_large_steps_of_fresh_weights_are_left_alone():
    rng, guard = np.random.default_rng(3), Guard(GuardConfig(), CLIP)
    for _ in range(300):
        seen = Seen(0.01 + 0.3 * float(rng.random() < 0.05), 0.001, 0.1 + float(rng.random() * 0.2), 0.09, 0.05)
        assert seen.loss <= guard.limits().loss
        assert guard.see(seen) is None
        assert guard.scale == 1.0


def test_a_loss_that_creeps_up_is_an_alarm_though_no_window_is_far_out():
    guard, rng = settled(Guard(GuardConfig(), CLIP)), np.random.default_rng(1)
    seen = 0
    while guard.regime != "stress":
        seen += 1
        guard.see(Seen(3.2 + 0.08 * seen + 0.2 * float(rng.standard_normal()), 0.15, 3.0, 2e-3, 0.2))
        assert seen < 40
    assert guard.scale == 0.5


def test_rows_of_another_phase_may_have_other_losses():
    guard = settled(Guard(GuardConfig(), CLIP))
    guard.new_rows()
    for seen in healthy(20, level=9.0):
        assert seen.loss < guard.limits().loss
        assert guard.see(seen) is None
        assert guard.regime == "stable"


def test_windows_without_a_gradient_make_none_of_the_others_too_large():
    """A slope read in bfloat16 may be 0 window after window."""
    guard = Guard(GuardConfig(), CLIP)
    guard.see(Seen(3.0, 0.15, 0.1, 1e-3, 0.1))
    for _ in range(8):
        guard.see(Seen(3.0, 0.15, 0.0))
    for number in range(8):
        guard.see(Seen(4.0 if not number else 3.0, 0.15, 0.5, 1e-3, 0.01))
        assert guard.regime != "stress"
        assert guard.limits().norm > 0.5
        assert guard.limits().clip > 0


def test_the_rate_stays_in_its_bounds_and_changes_by_at_most_half_or_a_tenth_whatever_is_seen():
    rng = np.random.default_rng(2)
    guard = Guard(GuardConfig(), CLIP)
    for step in range(2000):
        before = guard.scale
        odd = [3.0, 50.0, math.nan, math.inf][int(rng.choice(4, p=[0.9, 0.05, 0.03, 0.02]))]
        back = guard.see(Seen(odd, 0.2, float(rng.exponential(3)), 1e-3, float(rng.exponential(0.5))))
        assert 0.1 <= guard.scale <= guard.ceiling <= 1 or guard.scale > guard.ceiling >= 0.1
        assert guard.scale <= before * 1.1 + 1e-12
        assert guard.scale >= before / 2 or back is not None
        if step % 50 == 0:
            guard.keep(step)
        again = Guard.of(GuardConfig(), CLIP, json.loads(json.dumps(guard.state())))
        assert again == guard


def slice_of(**train) -> TrainSlice:
    settings = {"learning_rate": 1e-2, "warmup_steps": 0, "snapshot_steps": 4, "evaluations": 3} | train
    return TrainSlice(seed=3, train=TrainConfig(**settings), govern=GovernConfig(policy={"method": "patience"}))


def run(folder, house, checkpoint=None, **train):
    work = work_for(STAGE, folder, seed=3)
    more = {} if checkpoint is None else {"checkpoint": checkpoint}
    summary = STAGE.run(slice_of(**train), house.inputs(**more), work)
    return summary, work, {name: work.artifact(name).ref.digest for name in sorted(work.opened)}


def test_without_an_action_a_guarded_run_is_a_plain_one_to_the_bit(tmp_path):
    house = House(tmp_path / "house", rows=24)
    summary, guarded, digests = run(tmp_path / "guarded", house)
    _, plain, others = run(tmp_path / "plain", house, guard=None)
    assert summary.facts["guard"] == "did nothing"
    rows, bare = guarded.rows("curve"), plain.rows("curve")
    assert {row["guard"] for row in rows} == {"stable"}
    assert {row["guard"] for row in bare} == {"off"}
    assert all(row["update_ratio"] > 0 for row in rows)
    for name in ("step", "train_loss", "validation_loss", "learning_rate", "gradient_norm"):
        assert [row[name] for row in rows] == [row[name] for row in bare]
    assert digests["example_losses"] == others["example_losses"]
    ours, theirs = (load_merged(work.artifact("checkpoint").folder, house.pin) for work in (guarded, plain))
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())


class Killed(Exception):
    pass


def test_a_rate_far_too_large_is_gone_back_from_and_a_killed_segment_does_the_same_again(tmp_path, monkeypatch):
    house = House(tmp_path / "house", rows=64)
    wild = {"learning_rate": 2.0, "warmup_steps": 2}
    summary, work, expected = run(tmp_path / "whole", house, **wild)
    curve = work.rows("curve")
    first = next(row for row in curve if row["guard_action"].startswith("back to step "))
    assert first["step"] <= 6
    assert curve[-1]["guard_scale"] <= 0.25
    assert curve[-1]["learning_rate"] == pytest.approx(2.0 * curve[-1]["guard_scale"])
    again = curve[first["step"]]  # the state of step 0 warms up as it did before
    assert again["learning_rate"] == pytest.approx(1.0 * again["guard_scale"])
    assert "went back" in summary.facts["guard"]
    assert any("learning rate" in notice for notice in work.notices)
    _, plain, _ = run(tmp_path / "plain", house, guard=None, **wild)
    assert curve[-1]["validation_loss"] < plain.rows("curve")[-1]["validation_loss"]
    with monkeypatch.context() as patched:
        patched.setattr(loop._Segment, "_step", dying_at(first["step"] + 4))
        with pytest.raises(Killed):
            run(tmp_path / "killed", house, **wild)
    assert run(tmp_path / "killed", house, **wild)[2] == expected


def dying_at(step):
    real, made = loop._Segment._step, []

    def dying(self):
        made.append(1)
        if len(made) == step:
            raise Killed
        real(self)

    return dying


def test_the_state_of_a_checkpoint_that_a_segment_began_with_is_gone_back_to_and_not_written_again(
    tmp_path, monkeypatch
):
    house, written, real = House(tmp_path / "house", rows=32), [], Snapshots.write

    def noted(self, step, *args, **more):
        written.append(step)
        real(self, step, *args, **more)

    monkeypatch.setattr(Snapshots, "write", noted)
    start = run(tmp_path / "first", house)[1].artifact("checkpoint")
    assert written == [0, 4]
    wild = {"learning_rate": 2.0, "checkpoint": start}
    written.clear()
    _, work, expected = run(tmp_path / "whole", house, **wild)
    assert written == [4]
    actions = [row["guard_action"] for row in work.rows("curve")]
    assert any(action == "back to step 8" for action in actions)
    with monkeypatch.context() as patched:
        patched.setattr(Beginning, "of", lambda *_: None)
        written.clear()
        assert run(tmp_path / "apart", house, **wild)[2] == expected  # from a snapshot of its own
        assert written == [0, 4]
    with monkeypatch.context() as patched:
        patched.setattr(loop._Segment, "_step", dying_at(6))
        with pytest.raises(Killed):
            run(tmp_path / "killed", house, **wild)
    assert run(tmp_path / "killed", house, **wild)[2] == expected
