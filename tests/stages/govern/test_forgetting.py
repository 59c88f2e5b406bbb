"""Decisions where something must not be forgotten, on curves written by hand."""

from __future__ import annotations

import pytest

from stages.govern.page import PAGE
from tests.stages.govern.test_stage import GOOD, PATIENT, WARMUP, govern, ledger
from tests.stages.governor.test_policies import FLOPS
from tests.stages.select.test_view import Page

ALLOWED = 0.1
SPENT = ledger(warm_up=2 * FLOPS, score=FLOPS, train=4 * FLOPS)


def risen(rows, rises):
    more = {"retention_se": 0.4, "retention_rise_se": 0.01}
    return [{**row, "retention_loss": 2.0 + rise, **more} for row, rise in zip(rows, rises, strict=True)]


def decide(tmp_path, first, second, **settings):
    """Return the second decision and its summary."""
    settings = {"policy": PATIENT, "most_forgotten_nats": ALLOWED} | settings
    begun = risen(WARMUP, first)
    before, _ = govern(tmp_path / "a", [begun], **settings)
    return govern(tmp_path / "b", [begun, risen(GOOD, second)], before, SPENT, **settings)


def test_it_stops_where_too_much_is_forgotten_and_keeps_the_lowest_checkpoint_that_has_not(tmp_path):
    decision, summary = decide(tmp_path, [0.0, 0.01], [0.05, 0.08, 0.09, 0.2])
    assert (decision.action, decision.segment_flops) == ("stop", None)
    assert "risen by 0.2 nats" in decision.reason
    assert (decision.best, decision.best_step, decision.best_loss) == ("1" * 64, 50, 2.3)
    assert decision.numbers["best_step"] == 50
    assert decision.numbers["retention_rise"] == pytest.approx(0.2)
    (segments,) = [table for table in summary.tables if table.title == "Segments"]
    assert segments.columns[-1] == "retention at its end"
    assert [row[-1] for row in segments.rows] == pytest.approx([2.01, 2.2])
    assert summary.facts["retention loss at the start"] == 2.0
    assert "2.2000, risen by 0.2000" in summary.facts["retention loss now"]
    assert summary.facts["it may rise by"] == ALLOWED
    figures = Page(tmp_path / "b" / "work" / "outputs" / "decision" / "measured" / PAGE).figures()
    drawn = {trace.get("name"): trace.get("y") for figure in figures for trace in figure["data"]}
    assert drawn["nats forgotten"] == pytest.approx([0.0, 0.01, 0.05, 0.08, 0.09, 0.2])
    assert drawn["allowed"] == [ALLOWED, ALLOWED]


def test_a_segment_that_forgot_from_its_start_leaves_the_warm_up_as_the_best(tmp_path):
    decision, _ = decide(tmp_path, [0.0, 0.01], [0.3, 0.3, 0.3, 0.3])
    assert (decision.action, decision.best, decision.best_step) == ("stop", "0" * 64, 20)


def test_where_every_checkpoint_has_forgotten_the_run_keeps_none_and_says_so(tmp_path):
    decision, _ = govern(
        tmp_path, [risen(WARMUP, [0.0, 0.3])], policy=PATIENT, most_forgotten_nats=ALLOWED, notices=(told := [])
    )
    assert (decision.action, decision.best, decision.best_step, decision.best_loss) == ("stop", None, None, None)
    assert told == ["every checkpoint has forgotten more than is allowed: the run keeps none, and the base stands"]


def test_without_a_limit_it_is_shown_and_the_decision_is_that_of_a_run_without_a_retention_set(tmp_path):
    watched, summary = decide(tmp_path / "w", [0.0, 0.3], [0.5, 0.8, 0.9, 2.0], most_forgotten_nats=None)
    before, _ = govern(tmp_path / "p", [WARMUP], policy=PATIENT)
    plain, without = govern(tmp_path / "q", [WARMUP, GOOD], before, SPENT, policy=PATIENT)
    shown = {"retention_began", "retention_loss", "retention_rise", "retention_rise_se", "most_forgotten_nats"}
    assert set(watched.numbers) - set(plain.numbers) == shown
    numbers = {name: value for name, value in watched.numbers.items() if name not in shown}
    assert watched.model_copy(update={"numbers": numbers}) == plain
    assert "unset" in summary.facts["it may rise by"]
    assert not [fact for fact in without.facts if "retention" in fact]


def test_it_stops_in_the_last_round_too_where_a_policy_could_only_anneal(tmp_path):
    decision, _ = decide(tmp_path, [0.0, 0.01], [0.05, 0.08, 0.09, 0.2], rounds=2)
    assert (decision.action, decision.closes) == ("stop", False)
    kept, _ = decide(tmp_path / "kept", [0.0, 0.01], [0.05, 0.08, 0.09, 0.1], rounds=2)
    assert kept.action == "anneal"
