"""Faults 6 and 13 in the whole chain: killed at every stage's end and in the middle of the long ones, always resumed.

Under a budget of FLOPs a disturbed run makes the decisions, selections and checkpoints of one that was left alone, to
the byte. Under one of seconds the decisions that were committed stand, and the seconds that count are those of the
manifests: what a kill lost is charged to no decision. Every moment of every call: `benchmarks.soak --moments`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from data_contracts.records import Decision
from data_contracts.store import Store
from flows.workspace import Workspace
from tests.faults.mortal_loop import RACE, Moment, committed, killed, live, moments, write

pytestmark = [pytest.mark.slow, pytest.mark.shared, pytest.mark.timeout(300)]
FLOPS, SECONDS = 2 * 10**10, 900.0
TWICE = {"rounds": 2, "policy": {"method": "fixed_rounds", "rounds": 2}}
MORE = ("govern", "weigh-race", "govern-round-1", "promote")
"""Calls that are also killed with all computed and nothing published."""


def test_a_loop_killed_at_every_boundary_and_inside_every_long_stage_ends_as_if_it_had_not_been(
    tmp_path: Path, shared: Path
) -> None:
    whole = live(write(tmp_path / "whole", shared, {"flops": FLOPS}, RACE))
    assert whole is not None
    wanted = [
        moment
        for moment in moments(whole)
        if moment.place in ("part", "committed") or (moment.place == "made" and moment.call in MORE)
    ]
    assert {moment.call for moment in wanted} == set(whole["digests"]) - set(whole["reused"])
    inside = {moment.call for moment in wanted if moment.place == "part"}
    assert {
        "begin",
        "train-race-random",
        "score-race-influence",
        "score-won-influence",
        "score-round-2",
        "train-round-2",
    } <= inside
    assert "a new selection should bring" in whole["decisions"][1]["reason"], "the default policy has judged"
    path = write(tmp_path / "killed", shared, {"flops": FLOPS}, RACE)
    found = killed(path, wanted)
    assert found["decisions"] == whole["decisions"]
    assert found["digests"] == whole["digests"]
    assert found["candidate"] == whole["candidate"]
    *committed_calls, effect = whole["digests"]
    assert found["reused"] == committed_calls, "the last of the processes found everything committed"
    assert effect == "promote"
    workspace = Workspace.read(path)
    store, promoting = Store(workspace.address), workspace.config.promote
    champion = store.registry().current(promoting.registered_model, promoting.alias)
    assert champion is not None
    assert (champion.checkpoint.digest, champion.version) == (whole["candidate"], 1), "registered once"
    assert [row.status for row in store.runs()] == ["FINISHED", *["FAILED"] * len(wanted)]
    assert "RUNNING" not in {row.status for past in store.runs() for row in store.attempts(past.run)}


def test_under_a_budget_of_seconds_committed_decisions_are_replayed_and_no_lost_second_is_charged(
    tmp_path: Path, shared: Path
) -> None:
    path = write(tmp_path, shared, {"seconds": SECONDS}, {}, TWICE)
    ends = [Moment("govern", "committed"), Moment("train-round-1", "part"), Moment("train-round-2", "asked")]
    before: list[Decision] = []
    for moment in ends:
        assert live(path, moment) is None
        assert committed(path)[: len(before)] == before
        before = committed(path)
    assert len(before) == 2
    found = live(path)
    assert found is not None
    decisions = [Decision.model_validate(item) for item in found["decisions"]]
    assert decisions[:2] == before
    assert decisions[-1].stops
    store = Store(Workspace.read(path).address)
    attempts = {row.name: row for row in store.attempts(store.runs()[0].run)}
    assert {"ingest", "plan", "begin", "govern", "train-round-1", "govern-round-1"} <= set(found["reused"])
    for name, decision in zip(("govern", "govern-round-1"), before, strict=True):
        given = store.read_manifest(attempts[name].run).inputs
        spent = store.ledger(ref for refs in given.values() for ref in refs).total.seconds
        assert decision.remaining.seconds == pytest.approx(SECONDS - spent, abs=1e-6)
