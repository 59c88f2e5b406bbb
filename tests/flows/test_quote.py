"""A quote and the run after it, through the pipeline's own calls: a tiny model, real stages, a real store."""

from __future__ import annotations

import json

import pytest

from data_contracts.config import ArmConfig
from data_contracts.config_file import load
from data_contracts.errors import ConfigError
from data_contracts.quotes import HOURS_FILE, Hours, Quote
from data_contracts.store import Store
from flows.calling import call_directly
from flows.past_quotes import past_quotes, scores
from flows.pipeline import trained
from flows.pipeline_run import PipelineRun, recorded
from flows.quote import SHARE, quote, ways
from flows.workspace import Workspace
from tests.command import lazytrain
from tests.flows.small_run import lay_out

pytestmark = pytest.mark.shared
BUDGET = 30 * 10**10


def quoted(workspace: Workspace) -> tuple[PipelineRun, Quote, Hours]:
    """Quote, as the command does it."""
    store = Store(workspace.address)
    with recorded(workspace, store, call_directly, "quote") as run:
        ref = quote(run).refs["quote"]
    hours = Hours.model_validate_json((store.measured(ref) / HOURS_FILE).read_bytes())
    return run, store.record(ref, Quote), hours


@pytest.fixture(scope="module")
def made(tmp_path_factory, shared):
    """Return (workspace, quote's run, quote, hours) of a configuration that races two ways of choosing."""
    folder = tmp_path_factory.mktemp("quote")
    path = lay_out(
        folder,
        shared,
        budget={"flops": BUDGET, "price": {"hour": 36.0, "currency": "EUR", "stages": {"train": 72.0, "ingest": 0.0}}},
        auto={"arms": ["random", {"name": "bm25", "scorer": {"method": "bm25"}, "fraction": 0.3}], "least_steps": 1},
        plan={"window": 4, "micro_batches": [4], "techniques": [{"method": "full"}], "precision": "float32"},
        govern={"rounds": 1},
    )
    validation = (folder / "validation.jsonl").read_text().splitlines()
    (folder / "validation.jsonl").write_text("\n".join(validation[:7]))  # too few for words to tell anything
    workspace = Workspace.read(path).check()
    return workspace, *quoted(workspace)


def test_probes_stay_within_a_twentieth_of_the_budget_and_are_in_the_ledger(made):
    _, run, told, _ = made
    names = [item.name for item in run.steps]
    start = names.index("plan-round-1") + 1
    trying = run.steps[start:-1]
    assert {item.name for item in trying} >= {"train-race-random", "train-race-bm25", "weigh-race"}
    spent = sum(item.cost.flops for item in trying)
    assert 0 < spent <= SHARE * told.spendable_flops <= SHARE * BUDGET
    assert told.probe_flops == spent
    ledger = run.store.ledger(run.steps[-1].refs.values())
    assert ledger.total.flops == spent + told.warm_up_flops


def test_every_number_is_told_with_its_interval_and_a_run_may_spend_no_more_than_the_budget(made):
    _, _, told, hours = made
    bm25, chance = told.offer("bm25"), told.offer("random")
    assert bm25.basis == "probes"
    assert 0 <= bm25.probability.low <= bm25.probability.expected <= bm25.probability.high <= 1
    assert chance.probability is None
    assert chance.loss.low < chance.loss.expected < chance.loss.high
    assert chance.flops.high <= BUDGET
    assert [stop.share for stop in told.stops] == sorted(stop.share for stop in told.stops)
    assert [stop.loss.expected for stop in told.stops] == sorted((s.loss.expected for s in told.stops), reverse=True)
    assert hours.basis == "timed"
    assert hours.seconds.keys() == {"random", "bm25"}


def test_an_equal_quote_is_the_same_quote_and_costs_nothing(made):
    workspace, run, told, _ = made
    again, same, _ = quoted(workspace)
    assert all(item.cached for item in again.steps)
    assert (same, again.steps[-1].refs) == (told, run.steps[-1].refs)


def test_a_run_adopts_what_its_quote_made_and_the_quote_is_then_scored(made):
    workspace, run, told, hours = made
    store = Store(workspace.address)
    with recorded(workspace, store, call_directly, "run") as after:
        trained(after)
    mine = {item.name: item for item in after.steps}
    shared_with = [item for item in run.steps if item.name != "quote-run"]
    assert {item.name for item in shared_with} <= set(mine), "the quote made what a run does not"
    assert all(mine[item.name].cached and mine[item.name].run == item.run for item in shared_with)
    newest = past_quotes(store)[0]
    assert newest.followed_by == after.run
    assert newest.came.loss == after.decisions[-1].best_loss
    assert newest.came.flops == sum({item.run: item.cost.flops for item in after.steps}.values())
    assert newest.came.won is None  # chance or bm25 was run, not both
    found = scores(past_quotes(store))
    held = [
        told.offer(told.follows).loss.holds(newest.came.loss),
        told.offer(told.follows).flops.holds(newest.came.flops),
        hours.seconds[told.follows].holds(newest.came.seconds),
    ]
    assert (found.brier, found.intervals) == (None, 3 * found.quotes)
    assert found.held == sum(held) * found.quotes


def test_the_command_answers_in_json_with_money_at_the_price_and_joules_at_stated_watts(made):
    workspace, _, told, hours = made
    done = lazytrain("quote", "--json", "--watts", "100", cwd=workspace.root)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Quote.model_validate(found["quote"]) == told
    of = {stage: span.expected for stage, span in hours.stages[told.follows].items()}
    seconds = hours.seconds[told.follows].expected
    assert sum(of.values()) == pytest.approx(seconds)
    priced = 0.01 * (seconds - of["ingest"] + of["train"])  # ingest is free, training costs twice as much
    assert found["answer"]["money (EUR)"]["expected"] == pytest.approx(priced)
    assert of["ingest"] > 0
    assert {name: len(spans) for name, spans in found["joint"].items()} == dict.fromkeys(
        ("money (EUR)", "joules"), len(told.joint)
    )
    assert told.joint[0].loss.expected <= told.offer(told.joint[0].arm).loss.expected + 0.005
    if hours.watts is None:
        assert found["answer"]["joules"]["expected"] == pytest.approx(seconds * 100)
        assert found["answer"]["joules"]["told from"].startswith("estimated")
    assert found["past"]["quotes"] >= 1


def test_a_budget_without_room_for_probes_is_answered_from_plan_and_words_and_nothing_is_trained(made):
    workspace, *_ = made
    budget = workspace.config.budget.model_copy(update={"flops": BUDGET // 10})
    run, told, hours = quoted(workspace.with_sections({"budget": budget}))
    assert not [item for item in run.steps if item.stage in ("begin", "train", "weigh")]
    assert sum(item.cost.flops for item in run.steps) == told.probe_flops == told.warm_up_flops == 0
    assert all(offer.loss is None for offer in told.offers)
    assert [offer.basis for offer in told.offers] == ["nothing", "nothing"]  # words tell nothing here
    assert any(words.startswith("what any loss will be") for words in told.unknown)
    assert hours.basis == "modelled"


def test_without_ways_to_race_chance_and_what_is_configured_are_quoted(tmp_path, shared):
    config = load(lay_out(tmp_path, shared))
    chance, mine = ways(config, 40)
    assert (chance.name, mine.name, mine.passes) == ("random", "configured", 1.0)  # influence reads the model
    assert mine.fraction == 0.4
    alone = config.select.model_copy(update={"fraction": None, "count": 0, "include_target": True})
    with pytest.raises(ConfigError, match="the target alone is trained on"):
        ways(config.model_copy(update={"select": alone}), 40)
    few = config.select.model_copy(update={"fraction": None, "count": 10})
    assert ways(config.model_copy(update={"select": few}), 40)[1].fraction == 0.25
    odd = config.auto.model_copy(update={"arms": (ArmConfig(name="random"),)})
    only = ways(config.model_copy(update={"auto": odd}), 40)
    assert [arm.name for arm in only] == ["chance", "random"]  # that arm has a name of chance and is none
