"""A run goes on under a higher budget: what it trained is kept, what ended it is decided anew."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from data_contracts.arrow import read_table
from data_contracts.errors import ArtifactError, ConfigError
from data_contracts.records import Decision, Plan
from data_contracts.store import Store
from flows.calling import call_directly
from flows.command.laws import app as laws
from flows.command.share import app
from flows.histories import history_of
from flows.pipeline import trained
from flows.pipeline_run import PipelineRun, recorded
from flows.standing import check, standing
from flows.workspace import Workspace
from stages.admission import parse_slice
from stages.governor.law import history
from stages.stage import find_stage
from tests.flows.small_run import lay_out

pytestmark = pytest.mark.shared
BUDGET = 3 * 10**10
SECTIONS: dict[str, Any] = {
    "budget": {"flops": BUDGET},
    "plan": {"window": 1, "micro_batches": [1], "techniques": [{"method": "full"}], "precision": "float32"},
    "select": {"selector": {"method": "random"}, "fraction": 1.0},
    "train": {"evaluations": 8, "validation_rows": 4},
    "govern": {"rounds": 2, "policy": {"method": "fixed_rounds", "rounds": 9}},
}


def run_of(workspace: Workspace, resumes: str | None = None) -> PipelineRun:
    """Make a run's calls up to the decision that stops it."""
    with recorded(workspace, Store(workspace.address), call_directly, "small", resumes) as run:
        trained(run)
    return run


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, shared: Any) -> tuple[Workspace, PipelineRun]:
    """A run of two rounds, the second a closing decay."""
    workspace = Workspace.read(lay_out(tmp_path_factory.mktemp("standing"), shared, **SECTIONS)).check()
    return workspace, run_of(workspace)


def actions(run: PipelineRun) -> list[str]:
    return [decision.action for decision in run.decisions]


def test_a_run_under_a_higher_budget_goes_on_from_before_its_closing_decay(first: Any) -> None:
    workspace, run = first
    assert actions(run) == ["reselect", "anneal", "stop"]
    more = workspace.recorded(run.store.run_config(run.run), {"budget": {"flops": 2 * BUDGET}})
    after = run_of(more, run.run)
    old = {step.name: step for step in run.steps}
    ran = [step.name for step in after.steps if not step.cached]
    assert ran == ["govern-round-1", "train-round-2", "govern-round-2"]
    assert all(step.run == old[step.name].run for step in after.steps if step.cached)
    assert actions(after) == actions(run)
    before, now = run.decisions[1], after.decisions[1]
    assert now.remaining.flops == before.remaining.flops + BUDGET  # nothing is charged twice
    assert now.segment_flops == int(now.remaining.flops - 0.05 * 2 * BUDGET)
    spent = run.store.ledger(after.steps[-1].refs.values()).total.flops
    assert BUDGET < spent <= 2 * BUDGET, "it used what was added"
    noted = {row.name: row.run for row in run.store.attempts(after.run)}
    assert noted == {step.name: step.run for step in after.steps}
    # a run that goes on from that one under its own limits adopts all of it
    again = run_of(more, after.run)
    assert all(step.cached for step in again.steps)
    assert [step.run for step in again.steps] == [step.run for step in after.steps]


def test_more_rounds_keep_every_segment_of_a_run_that_used_all_of_its_rounds(first: Any) -> None:
    workspace, run = first
    stands = standing(run.store, run.run, workspace.recorded(run.store.run_config(run.run), {"govern": {"rounds": 5}}))
    more, one = ({**workspace.config.slice("train")["govern"], "rounds": rounds} for rounds in (5, 2))
    train = find_stage("train")
    same = [
        train.external(parse_slice(train, {**workspace.config.slice("train"), "govern": part}), workspace.root)
        for part in (more, one)
    ]
    assert same[0] == same[1], "segments are adopted too"
    kept = {result.run for result in stands.values()}
    first_decision = next(step for step in run.steps if step.name == "govern")
    assert first_decision.run in kept
    assert not kept & {
        step.run for step in run.steps if step.name in ("govern-round-1", "govern-round-2", "train-round-1")
    }
    for result in stands.values():
        if result.stage == "govern":
            assert not run.store.record(result.refs["decision"], Decision).stops


def test_under_the_same_limits_nothing_needs_to_stand(first: Any) -> None:
    workspace, run = first
    assert standing(run.store, run.run, workspace) == {}


def test_only_limits_may_be_others_and_only_of_a_run_that_goes_on() -> None:
    check({}, None)
    check(
        {"budget": {"flops": 1, "money": 2, "peak_bytes": 3}, "govern": {"rounds": 3}, "train": {"workers": 2}}, "abc"
    )
    with pytest.raises(ConfigError, match=r"train\.learning_rate"):
        check({"train": {"learning_rate": 1}}, "abc")
    with pytest.raises(ConfigError, match=r"plan\.window"):
        check({"plan": {"window": 1}}, "abc")
    with pytest.raises(ConfigError, match="no run is named"):
        check({"budget": {"flops": 1}}, None)


def test_a_pot_is_shared_over_runs_and_each_goes_on_up_to_its_share(first: Any) -> None:
    """One has run, one has not begun; the first is then continued as it was told."""
    workspace, run = first
    other = yaml.safe_load(workspace.file.read_text())
    fresh = workspace.root / "fresh.yaml"
    fresh.write_text(yaml.safe_dump({**other, "name": "fresh"}))
    page = workspace.root / "share.html"
    told = CliRunner().invoke(app, [str(workspace.file), str(fresh), "--flops", "4e10", "--json", "--page", str(page)])
    assert told.exit_code == 0, told.output
    mine, new = json.loads(told.stdout)["runs"]
    assert (new["share"], new["why"]) == (2e10, "nothing was run yet")
    assert new["command"].startswith("budget: {flops: 20000000000} in")
    rows = run.store.attempts(mine["run"])  # the newest
    decisions = [run.store.record(row.refs["decision"], Decision) for row in rows if "decision" in row.refs]
    fork = next(decision for decision in decisions if decision.anneals)
    kept = run.store.run_config(mine["run"])["budget"]["flops"] - fork.remaining.flops
    assert (mine["goes_on_from"], mine["limit"]) == (kept, kept + 2e10)
    assert mine["spent"] == run.store.ledger(ref for row in rows for ref in row.refs.values()).total.flops > kept
    assert mine["made_again_flops"] == decisions[-1].numbers["training_flops"] - fork.numbers["training_flops"] > 0
    assert f"--set budget.flops={int(mine['limit'])}" in mine["command"]
    assert mine["loss"]["low"] <= mine["loss"]["expected"] <= mine["loss"]["high"]
    assert "Several runs, one budget" in page.read_text()
    more = workspace.recorded(run.store.run_config(mine["run"]), {"budget": {"flops": int(mine["limit"])}})
    after = run_of(more, mine["run"])
    assert after.decisions[1].numbers["spendable_flops"] == pytest.approx(mine["training_flops"], abs=1)


def test_runs_that_go_on_from_one_another_are_one_user_and_another_configuration_a_second(first: Any) -> None:
    workspace, run = first
    begun = next(step.run for step in run.steps if step.name == "begin")
    assert run.store.users()[begun] == 1
    values = {**run.store.run_config(run.run), "promote": {"alias": "other"}}
    with recorded(workspace.recorded(values), run.store, call_directly, "other") as other:
        trained(other)
    assert all(step.cached for step in other.steps)
    assert run.store.users()[begun] == 2


def test_a_run_that_goes_on_under_another_memory_limit_is_planned_anew_and_keeps_what_it_trained(first: Any) -> None:
    workspace, run = first
    plan = run.store.record(next(step for step in run.steps if step.name == "plan-round-1").refs["plan"], Plan)
    assert plan.limit_bytes == 4 * 10**9
    limit = 3 * 10**9
    budget = {"flops": 2 * BUDGET, "peak_bytes": limit}
    after = run_of(workspace.recorded(run.store.run_config(run.run), {"budget": budget}), run.run)
    ran = [step.name for step in after.steps if not step.cached]
    assert ran == ["govern-round-1", "plan-round-2", "train-round-2", "govern-round-2"]
    decision = after.decisions[1]
    assert decision.replans
    assert decision.numbers["new_plan"] == f"{limit:,} bytes may be held, not 4,000,000,000 bytes"
    new = run.store.record(next(step for step in after.steps if step.name == "plan-round-2").refs["plan"], Plan)
    assert new.limit_bytes == limit
    assert new.allowed_bytes == 27 * 10**8
    # a run that was planned anew already is so once more: the plan of what is decided anew does not stand
    budget = {**budget, "peak_bytes": 2 * 10**9}
    again = run_of(workspace.recorded(after.store.run_config(after.run), {"budget": budget}), after.run)
    newest = again.store.record(next(step for step in again.steps if step.name == "plan-round-2").refs["plan"], Plan)
    assert newest.limit_bytes == 2 * 10**9


def test_laws_are_fitted_to_a_runs_own_evaluations(first: Any) -> None:
    workspace, run = first
    own = history_of(workspace, run.run[:12])
    curves = [
        read_table(run.store.open(step.refs["curve"]) / "data.arrow") for step in run.steps if "curve" in step.refs
    ]
    assert own.state.flops == sum(int(curve.column("flops").to_pylist()[-1]) for curve in curves)
    assert own.parameters - own.body == 512 * 64  # one embedding, which is the head too
    arguments = ["--run", run.run, "--config", str(workspace.given), "--law", "chinchilla", "--flops", "1e12", "--json"]
    told = json.loads(CliRunner().invoke(laws, arguments, catch_exceptions=False).stdout)["laws"][0]
    last = own.state.evaluations[-1]
    expected = {"parameters": own.parameters, "tokens": pytest.approx(1e12 * last.tokens / last.flops)}
    assert told["expected"]["split"] == expected
    assert told["runs"] == sum(point.tokens > 0 for point in own.state.evaluations)
    assert [one["name"] for one in told["constants"] if one["low"] is None] == ["log_a", "alpha"]
    table = history(own.state, own.parameters)
    assert table["steps"].tolist() == [point.step for point in own.state.evaluations if point.tokens]
    assert table["batch"].tolist() == [last.tokens / last.step] * len(table["steps"])
    with pytest.raises(ArtifactError, match="0 runs begin"):
        history_of(workspace, "zzz")
