"""Our policies under Ray Tune's own calls: Ray's ASHA on the same results, and our replay of each trial's file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_contracts.errors import ConfigError, InputError
from stages.govern.plain import replay
from stages.workers.tune import PolicyScheduler, PolicyStopper  # before any of Ray: its import settles loopback

MAX = 81


def drive(schedulers: list[Any], curves: np.ndarray, seed: int, sign: float = 1.0) -> list[list[str]]:
    """Report results of concurrent trials in a random order to each scheduler and return all decisions of each.

    A trial that the first scheduler stops reports no more.
    """
    rng, trials = np.random.default_rng(seed), [SimpleNamespace(trial_id=str(i)) for i in range(len(curves))]
    for scheduler in schedulers:
        for trial in trials:
            scheduler.on_trial_add(None, trial)
    at, running = np.zeros(len(curves), dtype=int), list(range(len(curves)))
    decided: list[list[str]] = [[] for _ in schedulers]
    while running:
        i = int(rng.choice(running))
        result = {"loss": sign * float(curves[i, at[i]]), "flops": int(at[i] + 1), "training_iteration": int(at[i] + 1)}
        at[i] += 1
        for said, scheduler in zip(decided, schedulers, strict=True):
            said.append(scheduler.on_trial_result(None, trials[i], result))
        if decided[0][-1] == "STOP" or at[i] == curves.shape[1]:
            running.remove(i)
            for scheduler in schedulers:
                scheduler.on_trial_complete(None, trials[i], result)
    return decided


@pytest.mark.parametrize(("mode", "reduction"), [("min", 2), ("min", 3), ("max", 4)])
def test_asha_decides_as_rays_scheduler_does_on_concurrent_trials(mode: str, reduction: int) -> None:
    rng = np.random.default_rng(reduction)
    curves = rng.uniform(0.5, 3, (24, 1)) + 2 / np.arange(1, 101) ** rng.uniform(0.2, 1, (24, 1))
    from ray.tune.schedulers import ASHAScheduler

    theirs = ASHAScheduler(
        time_attr="flops", metric="loss", mode=mode, grace_period=2, max_t=MAX, reduction_factor=reduction
    )
    ours = PolicyScheduler(
        {"method": "asha", "grace_flops": 2, "reduction": reduction}, metric="loss", mode=mode, budget_flops=MAX
    )
    ray, mine = drive([theirs, ours], curves, reduction, 1.0 if mode == "min" else -1.0)
    assert mine == ray
    assert ray.count("STOP") > 10
    assert ours.trials.ended == ray.count("STOP")


@pytest.mark.parametrize(
    "policy",
    [
        {"method": "gain_left"},
        {"method": "marginal_gain"},
        {"method": "patience", "patience": 2},
        {"method": "share_past_best"},
    ],
    ids=lambda policy: str(policy["method"]),
)
def test_every_trial_ends_where_the_replay_of_its_evaluations_stops(policy: dict[str, Any], tmp_path: Path) -> None:
    rng, steps = np.random.default_rng(5), np.arange(1, 31)
    curves = np.stack([2 + 1.5 / steps**0.7, 2 + np.exp(-steps / 3), 2 + 1 / steps + 0.02 * np.maximum(0, steps - 9)])
    curves = curves + 0.003 * rng.standard_normal(curves.shape)
    ours = PolicyScheduler(policy)
    assert ours.set_search_properties("loss", "min")
    assert not ours.set_search_properties("loss", None)
    (said,) = drive([ours], curves, 1)
    ends = []
    for i, curve in enumerate(curves):
        rows = [json.dumps({"step": s, "loss": y}) for s, y in zip(steps.tolist(), curve.tolist(), strict=True)]
        (tmp_path / "evals.jsonl").write_text("\n".join(rows))
        stopped = replay(tmp_path / "evals.jsonl", policy, "loss", "minimise").stopped_at
        ends.append(stopped)
        assert len(ours.trials.rows[str(i)]) == (stopped or len(curve))
    assert said.count("STOP") == sum(end is not None for end in ends) > 0


def test_the_stopper_says_the_same_and_ends_no_experiment() -> None:
    policy = {"method": "patience", "patience": 2}
    stopper, scheduler = PolicyStopper(policy, "loss", "min"), PolicyScheduler(policy, metric="loss", mode="min")
    trial: Any = SimpleNamespace(trial_id="a")
    for flops, loss in enumerate([3.0, 2.0, 2.5, 2.4], start=1):
        result = {"loss": loss, "flops": flops}
        assert stopper("a", result) == (scheduler.on_trial_result(None, trial, result) == "STOP") == (flops == 4)
    assert not stopper.stop_all()
    assert scheduler.debug_string() == "patience over flops: 1 ended"


def test_a_trial_that_went_back_is_judged_by_what_it_reports_since_and_a_repeated_result_counts_once() -> None:
    stopper = PolicyStopper({"method": "patience", "patience": 2}, "loss", "min")
    said = [
        stopper("a", {"loss": loss, "flops": flops})
        for flops, loss in [(1, 3.0), (2, 3.5), (2, 3.5), (1, 3.0), (2, 2.5)]
    ]
    assert said == [False] * 5
    assert [row["loss"] for row in stopper.trials.rows["a"]] == [3.0, 2.5]
    assert stopper("a", {"flops": 9, "lr": 1.0}) is False  # nothing was evaluated


def test_a_budget_ends_a_trial_and_what_was_seen_is_saved_and_restored(tmp_path: Path) -> None:
    trial: Any = SimpleNamespace(trial_id="a")
    ours = PolicyScheduler({"method": "fixed_rounds"}, metric="loss", mode="min", budget_flops=10)
    assert ours.on_trial_result(None, trial, {"loss": 1.0, "flops": 9}) == "CONTINUE"
    ours.save(str(tmp_path / "state"))
    again = PolicyScheduler({"method": "fixed_rounds"})
    again.restore(str(tmp_path / "state"))
    assert again.trials.rows == ours.trials.rows
    assert again.metric == "loss"
    assert again.on_trial_result(None, trial, {"loss": 1.0, "flops": 10}) == "STOP"
    again.on_trial_error(None, trial)
    assert again.trials.rows == {}


def test_what_it_cannot_judge_is_refused() -> None:
    trial: Any = SimpleNamespace(trial_id="a")
    with pytest.raises(InputError, match="flops"):
        PolicyScheduler({"method": "patience"}, metric="loss", mode="min").on_trial_result(None, trial, {"loss": 1.0})
    with pytest.raises(ConfigError, match="not set"):
        PolicyScheduler({"method": "patience"}).on_trial_result(None, trial, {"loss": 1.0, "flops": 1})
    with pytest.raises(ConfigError, match="min or max"):
        PolicyScheduler({"method": "patience"}, mode="least")
