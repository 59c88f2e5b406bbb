"""Scheduled runs of one configuration whose data change: what they go on from, what they say, and what is done anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.records import Decision
from data_contracts.store import Store
from flows.calling import call_directly
from flows.lineage import Start, start_of, trained_on
from flows.pipeline import Trained, first_plan, trained
from flows.pipeline_run import PipelineRun
from flows.workspace import Workspace
from tests.flows.small_run import lay_out, write
from tests.stores import blank

pytestmark = pytest.mark.shared


class Told(PipelineRun):
    """A run in this process that keeps what it told the user."""

    def __init__(self, path: Path) -> None:
        workspace = Workspace.read(path)
        store = Store(workspace.address)
        super().__init__(workspace, store, store.open_run(workspace.config.name, {}), call_directly)
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def start(self):
        data = self.call("ingest")
        return start_of(self, data, first_plan(self, data))

    def step(self, name):
        return next(step for step in self.steps if step.name == name)


def loop(path: Path, start: str) -> tuple[Told, Trained]:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    write(path.parent, {**values, "begin": {**values["begin"], "start": start}})
    run = Told(path)
    made = trained(run)
    run.store.close_run(run.run, "FINISHED", None)
    return run, made


def lines(path: Path, name: str) -> list[str]:
    return (path.parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()


def rewrite(path: Path, name: str, rows: list[str]) -> None:
    (path.parent / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def said(number: int) -> str:
    words = " ".join(str((number * 7919 + step * 104729) % 9973) for step in range(12))
    return json.dumps({"prompt": f"Say the numbers {words}", "completion": words})


@pytest.fixture(scope="module")
def first(tmp_path_factory, shared):
    """Return (configuration file, run, what it trained) of the first of several runs."""
    folder = tmp_path_factory.mktemp("lineage")
    path = lay_out(
        folder,
        shared,
        store={"tracking_uri": blank(folder).tracking_uri},
        budget={"flops": 3 * 10**10},
        ingest={"longest_tokens": 64},
        plan={"window": 4, "micro_batches": [4], "techniques": [{"method": "full"}], "precision": "float32"},
        score={"batch_tokens": 256},
        select={"fraction": 0.25},
        train={"evaluations": 1},
    )
    rewrite(path, "validation", lines(path, "validation")[:4])
    return (path, *loop(path, "anew"))


@pytest.fixture
def path(first, tmp_path) -> Path:
    """Return the configuration of a copy of the first run's folder, its store among it."""
    home = tmp_path / "copy"
    shutil.copytree(first[0].parent, home)
    values = yaml.safe_load((home / "lazytrain.yaml").read_text(encoding="utf-8"))
    return write(home, {**values, "store": {"tracking_uri": blank(home).tracking_uri}})


def test_of_a_pool_that_grew_only_new_rows_are_scored_and_the_same_again_is_all_reused(first, path):
    _, before, _ = first
    rewrite(path, "pool", [*lines(path, "pool"), said(1), said(2)])
    run, _ = loop(path, "warm_up")
    assert run.step("begin").cached
    assert run.step("begin").run == before.step("begin").run
    counts = [item.step("score-round-1").refs["scores"].rows for item in (before, run)]
    assert counts == [40, 42]
    manifest = run.store.read_manifest(run.step("score-round-1").run)
    assert 20 <= manifest.summary.measured["rows_taken_over"] <= 40, "whole batches are taken over"
    assert run.step("score-round-1").cost.flops < before.step("score-round-1").cost.flops
    assert not run.step("select-round-1").cached
    again, _ = loop(path, "warm_up")
    assert all(step.cached for step in again.steps)
    anew, _ = loop(path, "anew")
    assert not anew.step("begin").cached, "else another warm-up is drawn, and everything is scored by it"


@pytest.mark.parametrize(
    ("name", "why"), [("pool", "no longer in the pool"), ("validation", "the validation or the retention split")]
)
def test_a_warm_up_does_not_stand_whose_rows_or_validation_are_others(first, path, name, why):
    _, before, _ = first
    rewrite(path, name, [said(number) for number in range(10)])
    run = Told(path)
    run.workspace = run.workspace.with_sections({"begin": run.config.begin.model_copy(update={"start": "warm_up"})})
    assert run.start().begun is None
    assert why in run.notices[-1]
    assert before.run[:12] in run.notices[-1]


def test_a_run_with_another_target_goes_on_from_what_was_trained_and_pays_its_own_work_alone(first, path):
    _, before, made = first
    rewrite(path, "target", [*lines(path, "target")[:2], *(said(number) for number in range(6))])
    run, after = loop(path, "latest")
    store = run.store
    begun = store.read_manifest(run.step("begin").run)
    assert begun.inputs["start_from"] == made.candidate
    decisions = [store.record(step.refs["decision"], Decision) for step in run.steps if step.stage == "govern"]
    assert "the target is another" in decisions[0].reason
    assert decisions[0].numbers["target_rows_shared"] == 0.25
    assert decisions[0].numbers["spent_flops"] == run.step("begin").cost.flops
    own = {step.run: step.cost.flops for step in run.steps if step.name != "govern-round-1"}
    assert decisions[1].numbers["spent_flops"] == sum(own.values())
    assert -1 <= decisions[1].numbers["ranking_agreement"] < 1
    assert decisions[1].numbers["ranking_rows"] == 40
    assert set(trained_on(store, made.candidate[0])) <= set(after.selections)
    steps = read_table(store.open(run.step("begin").refs["curve"]) / TABLE_FILE).column("step").to_pylist()
    assert min(steps) > max(
        read_table(store.open(before.step("begin").refs["curve"]) / TABLE_FILE).column("step").to_pylist()
    ), "steps are counted on"
    assert any("25% of its rows are the same" in text for text in run.notices)
    assert any("its own budget does not pay" in text for text in run.notices)
    assert set(trained_on(store, after.candidate[0])) <= set(after.selections)
    again, _ = loop(path, "latest")
    assert all(step.cached for step in again.steps)


def test_a_run_that_begins_anew_says_that_the_target_is_another_and_keeps_its_warm_up(first, path):
    _, before, _ = first
    rewrite(path, "target", [*lines(path, "target")[:4], *(said(number) for number in range(20, 24))])
    run = Told(path)
    assert run.start() == Start()
    assert "50% of its rows are the same" in run.notices[0]
    assert not any("goes on" in text for text in run.notices)
    data = run.step("ingest")
    begun = run.call(
        "begin",
        base=(data.refs["base"],),
        plan=(run.step("plan").refs["plan"],),
        pool_tokens=(data.refs["pool_tokens"],),
        validation_tokens=(data.refs["validation_tokens"],),
    )
    assert begun.cached, "the warm-up reads no target"
    assert begun.run == before.step("begin").run
