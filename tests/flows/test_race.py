"""A race of ways of choosing through the pipeline's own loop, in this process: a tiny model, real stages, a real store."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch

from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.config import ARMS, ArmConfig, AutoConfig, Config
from data_contracts.config_file import load
from data_contracts.errors import ConfigError
from data_contracts.records import Decision, Likeness, Plan, Weighing
from data_contracts.store import Store
from flows.arms import (
    chooses,
    contest,
    first_share,
    least_probe,
    left_out,
    probe_flops,
    probed_share,
    sections,
    share_of,
)
from flows.calling import call_directly
from flows.pipeline import trained
from flows.pipeline_run import PipelineRun
from flows.race import race
from flows.workspace import Workspace
from stages.governor.payback import expected_price
from stages.model.batch import TokenTable, collate
from stages.model.checkpoint import load_merged
from stages.model.loss import document_losses
from stages.model.pin import read_pin
from stages.stage import Artifact
from stages.weigh.engine import best_evaluation
from tests.flows.small_run import lay_out, plain

pytestmark = pytest.mark.shared
BUDGET = 12 * 10**10
CANNOT_WORK = {"name": "balanced", "selector": {"method": "bids"}, "kind": 0.5}  # there is one target group


def opened(path) -> PipelineRun:
    workspace = Workspace.read(path)
    store = Store(workspace.address)
    return PipelineRun(workspace, store, store.open_run("race", {}), call_directly)


@pytest.fixture(scope="module")
def raced(tmp_path_factory, shared):
    """Return (configuration file, run, what it trained) of a race whose pool is half useless for the target."""
    folder = tmp_path_factory.mktemp("race")
    path = lay_out(
        folder,
        shared,
        budget={"flops": BUDGET},
        auto={
            "arms": ["random", ARMS["bm25"] | {"kind": 0.5}, CANNOT_WORK, ARMS["influence"] | {"kind": 0.5}],
            "probe_share": 0.08,
            "most_probes": 1.0,
            "least_steps": 1,
            "confidence": 0.9,
            "sample": 0.4,
        },
        plan={"window": 4, "micro_batches": [4], "techniques": [{"method": "full"}], "precision": "float32"},
        govern={"rounds": 2},
        train={"evaluations": 2},
        data={"retention": "retention.jsonl"},
    )
    (folder / "retention.jsonl").write_text(json.dumps({"prompt": "Say one.", "completion": "One."}) + "\n")
    rng = np.random.default_rng(0)
    rows = [json.loads(line) for line in (folder / "pool.jsonl").read_text().splitlines()]
    noise = [
        {"prompt": "".join(rng.choice(list("qxzjkv #@"), 80)), "completion": "".join(rng.choice(list("QXZJKV~^"), 60))}
        for _ in rows
    ]
    (folder / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + noise))
    validation = (folder / "validation.jsonl").read_text().splitlines()
    (folder / "validation.jsonl").write_text("\n".join(validation[:7]))  # too few for words to tell anything
    run = opened(path)
    return path, run, trained(run)


def step(run, name):
    return next(item for item in run.steps if item.name == name)


def test_every_arm_is_chosen_and_trained_with_equal_flops_and_the_winner_goes_on(raced):
    _, run, _ = raced
    names = [item.name for item in run.steps]
    assert [name for name in names if name.startswith("train")][:3] == [
        "train-race-random",
        "train-race-bm25",
        "train-race-influence",
    ]
    spent = [step(run, f"train-race-{arm}").cost.flops for arm in ("random", "bm25", "influence")]
    assert max(spent) < 1.5 * min(spent)
    assert max(spent) <= 0.08 * BUDGET
    weighing = run.store.record(step(run, "weigh-race").refs["weighing"], Weighing)
    assert [arm.name for arm in weighing.arms] == ["random", "bm25", "influence"]
    assert weighing.chosen == "bm25" or weighing.chosen == "influence", weighing  # half the pool is noise
    assert f"select-won-{weighing.chosen}" in names
    after = next(item for item in run.steps if item.name == "train-round-2")
    assert after.refs["checkpoint"] != step(run, f"train-race-{weighing.chosen}").refs["checkpoint"]


def test_what_trying_cost_is_charged_to_the_decisions_that_follow(raced):
    _, run, _ = raced
    before, after = run.decisions[0], run.decisions[1]
    for arm in ("random", "bm25", "influence"):
        assert set(step(run, f"train-race-{arm}").costs) == {"probe"}, "loading and evaluating it is trying too"
    assert set(step(run, "train-round-2").costs) == {"train", "eval"}
    race = [item for item in run.steps if item.name.split("-")[0] in ("score", "select", "train", "weigh")]
    race = race[: [item.name for item in race].index("weigh-race") + 1]
    assert before.remaining.flops - after.remaining.flops == sum(item.cost.flops for item in race)


def test_what_must_not_be_forgotten_is_watched_in_probes_too_against_the_loss_before_training(raced):
    _, run, _ = raced
    began = step(run, "begin").refs["retention_losses"]
    for name in ("train-race-random", "train-race-bm25", "train-race-influence", "train-round-2"):
        segment = step(run, name)
        assert run.store.read_manifest(segment.refs["curve"].run).inputs["retention_reference"] == (began,)
        rows = read_table(run.store.open(segment.refs["curve"]) / TABLE_FILE).to_pylist()
        assert [row["step"] for row in rows if row["retention_loss"] is not None] == [
            row["step"] for row in rows if row["validation_loss"] is not None
        ]


def test_a_sample_is_scored_before_the_race_and_the_whole_pool_only_for_the_winner(raced):
    _, run, _ = raced
    scores = run.store.open(step(run, "score-race-influence").refs["scores"])
    exact = read_table(scores / TABLE_FILE).column("exact").to_pylist()
    assert 0 < sum(exact) <= 0.41 * len(exact)


def test_the_same_race_again_is_reused_whole_with_the_same_decision(raced):
    path, first, made = raced
    again = opened(path)
    remade = trained(again)
    assert all(item.cached for item in again.steps)
    assert (remade.candidate, again.decisions) == (made.candidate, first.decisions)


def test_a_budget_too_small_to_tell_settles_on_the_first_arm_says_so_and_spends_nothing(raced, monkeypatch):
    path, _, _ = raced
    workspace = Workspace.read(path)
    auto = workspace.config.auto.model_copy(update={"least_steps": 50})
    store = Store(workspace.address)
    run = PipelineRun(workspace.with_sections({"auto": auto}), store, store.open_run("declined", {}), call_directly)
    told: list[str] = []
    monkeypatch.setattr(run, "notice", told.append)
    trained(run)
    assert any(text.startswith("random is used untried: ") for text in told), told
    names = [item.name for item in run.steps]
    assert not [name for name in names if name.startswith("weigh") or "-race-" in name]
    assert run.config.select.selector == {"method": "random"}


def test_an_arm_that_cannot_work_is_left_out_and_the_others_go_on(raced):
    _, run, _ = raced
    assert "score-race-balanced" in [item.name for item in run.steps]
    assert "train-race-balanced" not in [item.name for item in run.steps]


def test_an_arm_is_used_untried_and_for_nothing_where_words_are_sure(tmp_path, shared, monkeypatch):
    near = {"name": "near", "scorer": {"method": "bm25"}, "fraction": 0.3}
    path = lay_out(
        tmp_path,
        shared,
        auto={"arms": ["random", near]},
        plan={"window": 4, "micro_batches": [4], "techniques": [{"method": "full"}], "precision": "float32"},
    )
    kept = {}
    with gzip.open(shared / "data" / "super_ni" / "super_ni_permissive_150.jsonl.gz", "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            kept.setdefault(row["task"], []).append(json.dumps(plain(row)) + "\n")
    kin = kept["task1453_person_entity_extraction_btc_corpus"]
    pool = (tmp_path / "pool.jsonl").read_text().splitlines(keepends=True)
    for split, rows in {"pool": pool + kin[:20], "target": kin[20:30], "validation": kin[30:50]}.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(rows))
    run, told = opened(path), []
    monkeypatch.setattr(run, "notice", told.append)
    data = run.call("ingest")
    tokens = {f"{split}_tokens": data.ref(f"{split}_tokens") for split in ("pool", "target", "validation")}
    given = {"base": data.ref("base"), "pool_tokens": tokens["pool_tokens"]}
    planned = run.call("plan", **given, target_tokens=tokens["target_tokens"])
    plan = planned.ref("plan")
    begun = run.call("begin", plan=plan, **given, validation_tokens=tokens["validation_tokens"])
    decided = run.call("govern", curve=begun.ref("curve"), checkpoint=begun.ref("checkpoint"), plan=plan)
    examples = {split: data.ref(split) for split in ("pool", "target", "validation")}
    before = len(run.steps)
    won = race(
        run,
        planned=planned,
        decided=decided,
        base=data.ref("base"),
        checkpoint=begun.ref("checkpoint"),
        example_losses=begun.ref("example_losses"),
        **examples,
        **tokens,
    )
    assert won is None
    assert [item.name for item in run.steps[before:]] == ["score-like-near", "select-like-near"]
    assert sum(item.cost.flops for item in run.steps[before:]) == 0
    assert sum(item.cost.seconds for item in run.steps[before:]) > 0
    assert any(text.startswith("near, by words alone: ") for text in told), told
    likeness = run.store.record(run.steps[-1].refs["likeness"], Likeness)
    assert likeness.low > 0.2
    assert any(text.startswith("near is used untried: ") for text in told), told
    assert run.config.score.scorer["method"] == "bm25"


def like(chosen, pool, low, high):
    return Likeness(chosen=chosen, pool=pool, moved=chosen - pool, low=low, high=high, reference_rows=24)


def test_a_sure_arm_is_used_untried_with_as_many_rows_as_there_are_of_the_kind():
    plan, auto = plan_of(1000), AutoConfig(arms=("random", "bm25"), probe_share=0.05, most_probes=0.2)
    told = {"bm25": like(0.9, 0.15, 0.6, 0.8)}
    for limit, visits in ((100.0, 0.1), (500.0, 0.15), (800.0, 0.8)):  # once; all of the kind; beside them others
        held = contest(auto.arms, plan, limit, auto, 1e9, told)  # a budget without room for a race
        assert [(arm.name, arm.kind) for arm in held.arms] == [("bm25", 0.15)]
        assert share_of(held.arms[0], plan, limit) == pytest.approx(visits)
        assert first_share(held.arms[0], plan, limit) == pytest.approx(min(0.15, visits))
        assert not held.left_out


def test_a_choice_with_more_visits_than_its_kind_is_given_is_a_core_and_others_once():
    config = Config(name="x", model={"path": "m"}, data={"pool": "p", "target": "t"})
    arm = ArmConfig(name="near", kind=0.15, scorer={"method": "bm25"})
    plain, cored = (sections(config, arm, share)["select"] for share in (0.15, 0.8))
    assert (plain.fraction, plain.repetition) == (0.15, None)
    assert (cored.fraction, cored.repetition) == (0.8, {"method": "core", "share": 0.15, "visits": 4.0})
    chance = ArmConfig(name="random", selector={"method": "random"}, epochs=1)
    assert sections(config, chance, 0.8)["select"].repetition is None
    law = {"method": "muennighoff"}
    asked = config.model_copy(update={"select": config.select.model_copy(update={"repetition": law})})
    assert sections(asked, arm, 0.8)["select"].repetition == law


def test_an_arm_that_surely_moves_little_is_left_out_and_chance_needs_no_race():
    auto = AutoConfig(arms=("random", "bm25"), probe_share=0.05, most_probes=0.2)
    held = contest(auto.arms, plan_of(1000), 500.0, auto, 1.0, {"bm25": like(0.05, 0.01, 0.0, 0.1)})
    assert [arm.name for arm in held.arms] == ["random"]
    assert held.left_out == {"bm25": "too few of the rows it takes are of the target's kind"}


def test_where_words_are_not_sure_or_tell_nothing_a_race_decides():
    auto = AutoConfig(arms=("random", "bm25"), probe_share=0.05, most_probes=0.2)
    for told in ({"bm25": like(0.4, 0.1, 0.1, 0.5)}, {}):
        held = contest(auto.arms, plan_of(1000), 500.0, auto, 1.0, told)
        assert ([arm.name for arm in held.arms], held.probe_flops) == (["random", "bm25"], 25.0)


@pytest.mark.parametrize(("moved", "used"), [(0.3, "bm25"), (0.19, "random")])
def test_where_words_are_not_sure_and_nothing_can_be_tried_what_is_likelier_is_used(moved, used):
    auto = AutoConfig(arms=("random", "bm25"), probe_share=0.05, most_probes=0.2)
    held = contest(auto.arms, plan_of(1000), 500.0, auto, 1e9, {"bm25": like(0.1 + moved, 0.1, 0.1, 0.5)})
    assert ([arm.name for arm in held.arms], held.probe_flops) == ([used], 0.0)


def test_a_dear_arm_that_can_be_tried_is_raced_against_a_sure_one():
    auto = AutoConfig(arms=("random", "bm25", "cascade"), probe_share=0.01, most_probes=0.2)
    told = {"bm25": like(0.9, 0.1, 0.6, 0.9)}
    held = contest(auto.arms, plan_of(1000), 3000.0, auto, 1.0, told)
    assert [arm.name for arm in held.arms] == ["random", "bm25", "cascade"]
    held = contest(auto.arms, plan_of(1000), 700.0, auto, 1.0, told)  # its price is above half
    assert [arm.name for arm in held.arms] == ["bm25"]
    assert list(held.left_out) == ["cascade"]


def test_an_arm_is_dear_to_try_too_and_where_all_would_take_too_much_nothing_is_tried():
    auto, plan = AutoConfig(arms=("random", "bm25", "cascade"), probe_share=0.01, most_probes=0.2), plan_of(1000)
    three = 3 * 30 + 0.2 * 0.4 * 1000  # probes, and a sample's scores
    for limit, tried in ((5 * three + 1, 3), (5 * three - 1, 2), (5 * 2 * 30 - 1, 1)):
        held = contest(auto.arms, plan, limit, auto, 30.0, {})
        assert len(held.arms) == tried
        assert ("cascade" in held.left_out) == (tried < 3)


def test_what_training_noted_of_each_validation_document_is_what_the_arms_checkpoint_gives(raced):
    _, run, _ = raced
    made, base = step(run, "train-race-bm25"), step(run, "ingest").refs["base"]
    rows = TokenTable(read_table(run.store.open(step(run, "ingest").refs["validation_tokens"]) / TABLE_FILE))
    pin = read_pin(Artifact(base, run.store.open(base), lambda: run.store.measured(base)))
    model = load_merged(run.store.open(made.refs["checkpoint"]), pin, dtype=torch.float32, device="cpu")
    noted, tokens = best_evaluation(read_table(run.store.open(made.refs["validation_losses"]) / TABLE_FILE))
    with torch.no_grad():
        for document in range(len(rows)):
            loss, count = document_losses(model, collate([rows.row(document)]))
            assert (noted[document], tokens[document]) == (pytest.approx(float(loss), rel=1e-5), int(count))
    assert step(run, "weigh-race").cost.flops == 0


def test_where_every_arm_takes_the_whole_pool_there_is_nothing_to_race_for():
    plan, auto = plan_of(1000), AutoConfig(arms=("random", "bm25", "influence"))
    assert not chooses(auto.arms, plan, 10_000)  # four visits of everything, and money left
    assert chooses(auto.arms, plan, 2_000)
    assert not chooses(auto.arms[:1], plan, 2_000)


def test_the_shortest_probe_is_its_steps_and_the_evaluations_that_read_them():
    numbers = {"step_flops": 10, "least_segment_flops": 80}  # a step with its evaluation costs 40
    decision = Decision.model_construct(numbers=numbers)
    assert least_probe(decision, 4, 2) == 4 * 10 + 2 * 30
    assert least_probe(decision, 4, 9) == 4 * 40  # no more evaluations than steps


def test_a_probe_is_as_long_as_it_must_be_where_all_together_stay_affordable():
    auto, plan = AutoConfig(arms=("random", "bm25"), probe_share=0.03, most_probes=0.2), plan_of(1000)
    two, three = auto.arms, (*auto.arms, ArmConfig(name="other"))
    assert probe_flops(two, plan, 1000.0, auto, 20.0) == 30.0  # its share tells enough
    assert probe_flops(two, plan, 1000.0, auto, 100.0) == 100.0
    assert probe_flops(two, plan, 1000.0, auto, 101.0) == 0.0
    assert probe_flops(three, plan, 1000.0, auto, 100.0) == 0.0
    small = auto.model_copy(update={"most_probes": 0.03})
    assert probe_flops(two, plan, 1000.0, small, 10.0) == 15.0, "shorter than its share: all together take 3 %"
    assert probe_flops(three, plan, 1000.0, small, 10.0) == pytest.approx(10.0)
    assert probe_flops(three, plan, 1000.0, small, 10.1) == 0.0
    assert probe_flops(two, plan, 10_000.0, auto, 20.0) == 0.0, "the budget visits all of the pool"


def test_an_arm_is_left_out_for_its_price_or_for_a_sample_that_its_probe_would_visit_too_often():
    plan, auto = plan_of(1000), AutoConfig(arms=("random", "influence"), probe_share=0.1, sample=0.2)
    influence = auto.arms[1].model_copy(update={"kind": 0.5})
    assert left_out(influence, plan, 1999.0, auto) == "its price is above 50%"
    # with 3,000 FLOPs: a pass is paid, the rest visits half the pool, the kind, four times; a fifth of that is 100 FLOPs a pass
    assert left_out(influence, plan, 3000.0, auto) == "its probe would visit a row more than 2 times"
    assert left_out(influence, plan, 3000.0, auto.model_copy(update={"probe_share": 0.06})) == ""
    assert left_out(ArmConfig(name="few", fraction=0.01), plan, 3000.0, auto) != ""


def test_a_probe_takes_more_of_a_choice_than_its_core_where_it_would_visit_that_too_often():
    plan, auto = plan_of(1000), AutoConfig(arms=("random", "bm25", "influence"), sample=0.2)
    _, near, dear = auto.arms
    assert probed_share(near, plan, 2000.0, 40.0, auto) == pytest.approx(0.1)  # the core: 0.4 visits of a row
    assert probed_share(near, plan, 2000.0, 300.0, auto) == pytest.approx(0.15)  # two visits of each
    assert probed_share(dear, plan, 4000.0, 20.0, auto) == pytest.approx(0.02)  # a fifth of the core
    assert probed_share(dear, plan, 4000.0, 80.0, auto) == pytest.approx(0.04)
    assert probed_share(dear, plan, 4000.0, 900.0, auto) == pytest.approx(0.08)  # and then it is left out
    assert left_out(dear, plan, 4000.0, auto.model_copy(update={"probe_share": 0.2})) != ""


def test_settings_of_an_arm_are_refused_at_once_under_the_arms_own_name(tmp_path, shared):
    arms = ["random", {"name": "odd", "scorer": {"method": "bm25", "nope": 1}}]
    path = lay_out(tmp_path, shared, auto={"arms": arms})
    with pytest.raises(ConfigError, match=r"auto\.arms\.1\.scorer\.nope"):
        Workspace.read(path).check()


def test_an_arm_whose_scorer_reads_the_model_is_not_tried_as_if_it_were_free(tmp_path, shared):
    arms = ["random", {"name": "hard", "scorer": {"method": "perplexity"}}]
    with pytest.raises(ConfigError, match=r"(?s)reads the model.*`auto\.arms\.1\.passes`"):
        Workspace.read(lay_out(tmp_path, shared, auto={"arms": arms})).check()


def test_a_filter_that_reads_scores_is_refused_where_an_arm_of_chance_has_none(tmp_path, shared):
    path = lay_out(tmp_path, shared, auto={"arms": ["random", "bm25"]}, select={"noise": {"method": "loss"}})
    with pytest.raises(ConfigError, match="the arm random has none"):
        Workspace.read(path).check()


def plan_of(pass_flops):
    return Plan(
        technique={}, precision="float32", micro_batch=1, accumulation=1, packed=False, row_tokens=1, trainable=1,
        peak_bytes=1, phases={}, flops_per_token=1, flops_per_token_forward=1, pass_flops=pass_flops, why="",
    )  # fmt: skip


def test_the_price_is_what_the_filters_let_through_and_text_is_free():
    plan = plan_of(1000)
    assert expected_price(ArmConfig(**ARMS["bm25"]), plan) == 0
    assert expected_price(ArmConfig(**ARMS["influence"]), plan) == 1000
    assert expected_price(ArmConfig(**ARMS["cascade"]), plan) == pytest.approx(400)


def test_a_sampled_cascade_keeps_its_filters_and_draws_behind_them(tmp_path, shared):
    config = load(lay_out(tmp_path, shared))
    made = sections(config, ArmConfig(**ARMS["cascade"]), 0.05, sample=0.2)
    assert made["score"].coverage == {
        "method": "cascade",
        "filters": [{"method": "bm25", "keep": 0.4}, {"method": "random", "keep": 0.2}],
    }
    assert made["select"].fraction == 0.05


def test_arms_are_named_once_and_by_names_that_there_are():
    assert [arm.name for arm in AutoConfig(arms=("random", "bm25")).arms] == ["random", "bm25"]
    assert len(AutoConfig(arms=("random",)).arms) == 1
    with pytest.raises(ValueError, match="a name of its own"):
        AutoConfig(arms=("random", "random"))
    with pytest.raises(ValueError, match="one of random, bm25, cascade, influence"):
        AutoConfig(arms=("random", "bm52"))
