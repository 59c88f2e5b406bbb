"""What `plan --explain` prints before anything was tried, against the algebra of prices."""

from __future__ import annotations

import pytest

from data_contracts.records import Likeness
from flows.command.explain import last_weighing, prices_table, to_race
from flows.workspace import Workspace
from tests.flows.small_run import lay_out
from tests.flows.test_race import plan_of

pytestmark = pytest.mark.shared


def rows(tmp_path, shared, flops, pool_rows=1000, **auto):
    tmp_path.mkdir(exist_ok=True)
    sections = {"budget": {"flops": flops}, **({"auto": auto} if auto else {})}
    workspace = Workspace.read(lay_out(tmp_path, shared, **sections))
    return {row[0]: row for row in prices_table(plan_of(1000), workspace, pool_rows).rows}


def test_prices_shares_and_what_a_choice_must_be_worth(tmp_path, shared):
    found = rows(tmp_path, shared, 4000, arms=["random", "bm25", "cascade", "influence"], most_probes=0.2)
    assert list(found) == ["random", "bm25", "cascade", "influence"]
    assert found["random"] == ("random", 0.0, "0.0%", "the arm to beat", "x 1.00", "x 1.00", "x 1.00")
    assert found["influence"] == ("influence", 1000.0, "25.0%", "tried", "x 1.33", "x 1.09", "x 1.03")
    assert found["cascade"][1:3] == (400.0, "10.0%")


def test_an_arm_too_dear_and_a_budget_too_small_are_named(tmp_path, shared):
    found = rows(tmp_path / "a", shared, 1000)
    assert found["influence"][3] == "left out: its price is above 50%"
    assert found["influence"][4:] == ("never", "x 1.50", "x 1.11")
    few = rows(tmp_path / "b", shared, 1000, pool_rows=10)
    assert few["bm25"][3].startswith("no: 2 probes of 4 step(s) take 800 FLOPs")


def test_what_words_tell_decides_what_is_used(tmp_path, shared):
    workspace = Workspace.read(lay_out(tmp_path, shared, budget={"flops": 1000}))
    told = {"bm25": Likeness(chosen=0.9, pool=0.1, moved=0.8, low=0.6, high=0.9, reference_rows=24)}
    found = {row[0]: row[3] for row in prices_table(plan_of(1000), workspace, 10, told).rows}
    assert (found["random"], found["bm25"]) == ("no: bm25 is used", "used untried")
    told = {"bm25": Likeness(chosen=0.1, pool=0.1, moved=0.0, low=-0.1, high=0.1, reference_rows=24)}
    found = {row[0]: row[3] for row in prices_table(plan_of(1000), workspace, 10, told).rows}
    assert found["random"] == "used untried"
    assert found["bm25"] == "left out: too few of the rows it takes are of the target's kind"


def test_a_store_without_a_race_has_no_weighing(tmp_path, shared):
    assert last_weighing(Workspace.read(lay_out(tmp_path, shared))) is None


def test_a_race_that_is_configured_is_not_asked_for_again():
    assert to_race(0).startswith("set `auto")
    assert "set" not in to_race(2)
