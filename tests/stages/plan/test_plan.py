"""The stage: what it chooses, what it refuses, and why it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_contracts.arrow import write_table
from data_contracts.cost import Cost
from data_contracts.errors import BudgetError, ConfigError, DoesNotFitError
from data_contracts.ledger import Entry, Ledger
from data_contracts.records import ModelPin, Plan
from data_contracts.tables import CURVE
from stages.admission import parse_slice
from stages.model.checkpoint import save_checkpoint
from stages.model.load import load_model
from stages.plan.search import micro_batches
from stages.plan.stage import STAGE, PlanSlice
from stages.stage import Artifact
from stages.train.rows import TIMING
from tests.local_work import LocalWork
from tests.stages.plan.conftest import random_rows, token_columns

pytestmark = pytest.mark.shared
FULL = {"techniques": [{"method": "full"}]}
Planned = Callable[..., tuple[Plan, LocalWork, Any]]


@pytest.fixture
def inputs(pin: ModelPin, given: Callable[..., dict[str, Artifact]]) -> dict[str, Artifact]:
    """A pool whose longest row is 64 tokens, a target whose longest is 80."""
    return given(pin, pool=token_columns(random_rows(10, 64, 20, 30)), target=token_columns(random_rows(80, 12)))


def test_the_preferred_technique_is_chosen_where_it_fits_and_planned_on_the_longest_row(
    inputs: dict[str, Artifact], planned: Planned
) -> None:
    plan, _, summary = planned({}, inputs)
    assert plan.technique["method"] == "full"
    assert (plan.row_tokens, plan.micro_batch, plan.accumulation, plan.precision) == (80, 4, 2, plan.precision)
    assert plan.trainable == 260_032
    assert plan.peak_bytes == max(plan.phases.values())
    assert {item["technique"] for item in plan.considered} == {"full", "lora"}
    assert [item["reason"] for item in plan.considered].count("chosen") == 1
    mine = next(item for item in plan.considered if item["reason"] == "chosen")
    assert mine["examples"] == plan.micro_batch * plan.accumulation
    assert len({(item["place"], item["technique"]) for item in plan.considered}) == 2
    assert [table.title.split()[0] for table in summary.tables] == ["Ways", "Pareto", "Bytes"]
    front = [item for item in plan.considered if item["on_front"]]
    assert max(item["tokens_per_second"] for item in plan.considered) in [item["tokens_per_second"] for item in front]
    assert min(item["peak_bytes"] for item in plan.considered) in [item["peak_bytes"] for item in front]
    # closed form: 6 x 226,560 linear weights, attention 14 T² h a layer, head 6 x 64 x 512 an answer token
    pool = [(n, n - n // 2) for n in (10, 64, 20, 30)]
    flops = sum(6 * 226_560 * n + 5 * 14 * n * n * 64 + 6 * 64 * 512 * answers for n, answers in pool)
    assert plan.pass_flops == pytest.approx(flops, abs=2)
    assert plan.flops_per_token == pytest.approx(flops / 124, abs=1)


@pytest.mark.slow
def test_less_memory_gives_savings_and_smaller_micro_batches_then_the_next_technique(
    inputs: dict[str, Artifact], planned: Planned
) -> None:
    settings = {"headroom": 0, "savings": ["recompute", "states_8bit"]}
    free, _, _ = planned({"plan": settings}, inputs)
    assert (free.micro_batch, free.recomputed_blocks, free.optimizer_states, free.loss_chunks) == (4, (), "float32", 1)
    peaks = {(item["technique"], item["micro_batch"]): item["peak_bytes"] for item in free.considered}
    speeds, found = [free.tokens_per_second], []
    for limit in (peaks["full", 4] - 1, peaks["full", 1] - 1):
        plan, _, _ = planned({"plan": settings, "budget": {"peak_bytes": limit}}, inputs)
        assert plan.peak_bytes <= limit
        assert plan.technique["method"] == "full"
        assert plan.micro_batch * plan.accumulation == 8
        refused = [item for item in plan.considered if not item["fits"]]
        assert all(item["peak_bytes"] > limit and "allowed" in item["reason"] for item in refused)
        rivals = [item for item in plan.considered if item["fits"] and item["technique"] == "full"]
        worth = max(item["tokens_per_second"] * (0.95 if "8 bits" in item["savings"] else 1) for item in rivals)
        speeds.append(plan.tokens_per_second * (0.95 if plan.optimizer_states == "8bit" else 1))
        assert speeds[-1] == pytest.approx(worth)
        found.append(plan)
    assert len(found[0].recomputed_blocks) == 1
    assert found[1].recomputed_blocks or found[1].optimizer_states == "8bit"
    assert speeds == sorted(speeds, reverse=True)
    with pytest.raises(DoesNotFitError) as caught:
        planned({"plan": {**settings, **FULL}, "budget": {"peak_bytes": 2**20}}, inputs)
    with_less = {"plan": settings, "budget": {"peak_bytes": caught.value.needed_bytes - 1}}
    assert planned(with_less, inputs)[0].technique["method"] == "lora"


@pytest.mark.slow
def test_an_impossible_budget_names_the_nearest_that_would_do(inputs: dict[str, Artifact], planned: Planned) -> None:
    few = {"plan": {"savings": ["recompute"]}}
    with pytest.raises(BudgetError) as caught:
        planned({"budget": {"peak_bytes": "100MB"}, **few}, inputs)
    assert isinstance(caught.value, DoesNotFitError)
    needed = caught.value.needed_bytes
    assert f"at least {needed:,}" in caught.value.remedy
    plan, _, _ = planned({"budget": {"peak_bytes": needed}, **few}, inputs)
    assert plan.peak_bytes <= 0.9 * needed
    with pytest.raises(BudgetError):
        planned({"budget": {"peak_bytes": needed - 2}, **few}, inputs)


def test_a_step_that_the_flops_left_cannot_pay_is_refused(inputs: dict[str, Artifact], planned: Planned) -> None:
    spent = Ledger.fold([Entry("i", "r", "begin", {"train": Cost(flops=10**12 - 1000)})])
    with pytest.raises(BudgetError, match="1,000 are left"):
        planned({"budget": {"flops": 10**12}, "plan": FULL}, inputs, ledger=spent)
    plan, _, summary = planned({"budget": {"flops": 10**12}, "plan": FULL}, inputs)
    assert summary.facts["passes_that_remain"] == pytest.approx(10**12 / plan.pass_flops)


def test_a_checkpoint_fixes_the_technique(
    pin: ModelPin, inputs: dict[str, Artifact], planned: Planned, tmp_path: Path
) -> None:
    work = LocalWork(tmp_path / "c", {"checkpoint": "checkpoint"})
    trainer = {"technique": {"method": "lora", "r": 3}, "step": 1}
    save_checkpoint(work.path("checkpoint"), load_model(pin), pin, {}, trainer)
    plan, _, _ = planned({}, {**inputs, "checkpoint": work.artifact("checkpoint")})
    assert plan.technique["method"] == "lora"
    assert plan.technique["r"] == 3
    assert {item["technique"] for item in plan.considered} == {"lora"}


@pytest.mark.parametrize(("first", "second", "chosen"), [("full", "lora", "full"), ("lora", "full", "lora")])
def test_a_checkpoint_of_another_technique_goes_on_by_full_where_that_is_preferred_and_fits(
    pin: ModelPin, inputs: dict[str, Artifact], planned: Planned, tmp_path: Path, first: str, second: str, chosen: str
) -> None:
    named = {"techniques": [{"method": first}, {"method": second}]}
    own, _, _ = planned({"plan": {"techniques": [{"method": "lora"}]}}, inputs)
    work = LocalWork(tmp_path / "c", {"checkpoint": "checkpoint"})
    save_checkpoint(work.path("checkpoint"), load_model(pin), pin, {}, {"technique": own.technique, "step": 1})
    given = {**inputs, "checkpoint": work.artifact("checkpoint")}
    assert planned({"plan": named}, given)[0].technique["method"] == chosen
    least = min(item["peak_bytes"] for item in own.considered) * 10 // 9 + 1
    short, _, _ = planned({"plan": {**named, "savings": []}, "budget": {"peak_bytes": least}}, given)
    assert short.technique["method"] == "lora", "no more memory than that: full does not fit"


@pytest.mark.parametrize(("noise", "window"), [(None, 8), (15 * 8.0, 8), (15 * 20.0, 20), (15 * 900.0, 32), (1.0, 4)])
def test_measured_gradient_noise_moves_the_window_within_bounds(
    inputs: dict[str, Artifact], planned: Planned, tmp_path: Path, noise: float | None, window: int
) -> None:
    """A pool row has (5 + 32 + 10 + 15) / 4 = 15.5 answer tokens in the mean."""
    guard = {"guard": ["off"], "guard_scale": [1.0], "guard_action": [""]}
    work = LocalWork(tmp_path / "c", {"curve": "curve"})
    empty: dict[str, list[Any]] = {name: [None] for name in CURVE.schema.names}
    row = {**empty, "step": [1], "phase": ["warmup"], "epoch": [1.0], "tokens": [1], "flops": [1]}
    write_table(
        work._place("curve") / "data.arrow",
        CURVE.schema,
        {**row, "gradient_noise": [noise], "learning_rate": [1e-4], **guard},
    )
    plan, _, _ = planned({"plan": FULL}, {**inputs, "curve": [work.artifact("curve")]})
    assert abs(plan.micro_batch * plan.accumulation - window) <= plan.micro_batch


@pytest.mark.parametrize(("window", "micro", "examples", "said"), [(10, 4, 12, True), (8, 4, 8, False)])
def test_a_window_that_is_rounded_up_to_whole_micro_batches_is_said(
    inputs: dict[str, Artifact], planned: Planned, window: int, micro: int, examples: int, said: bool
) -> None:
    _, work, summary = planned({"plan": {**FULL, "window": window, "micro_batches": [micro]}}, inputs)
    assert summary.facts["examples_per_step"] == examples
    notices = [text for text in work.notices if f"{examples} examples, {window} rounded up" in text]
    assert bool(notices) == said


def test_a_window_always_holds_two_micro_batches() -> None:
    assert micro_batches((8, 4, 2, 1), 8, 0) == [4, 2, 1]
    assert micro_batches((8, 4, 2, 1), 16, 0) == [8, 4, 2, 1]
    assert micro_batches((8, 4, 2, 1), 8, 4) == [2, 1]
    assert micro_batches((8, 4), 2, 0) == [2], "no more than the window that was asked for"
    assert micro_batches((8,), 8, 2) == [4]


def test_a_row_longer_than_the_model_was_made_for_is_noticed(
    pin: ModelPin, given: Callable[..., dict[str, Artifact]], planned: Planned
) -> None:
    _, work, _ = planned({"plan": FULL}, given(pin, pool=token_columns(random_rows(600))))
    assert any("600 tokens" in notice and "512" in notice for notice in work.notices)


def test_a_pool_without_rows_is_refused(
    pin: ModelPin, given: Callable[..., dict[str, Artifact]], planned: Planned
) -> None:
    with pytest.raises(ConfigError, match="none"):
        planned({}, given(pin, pool=token_columns([])))


def test_equal_inputs_give_equal_plans(inputs: dict[str, Artifact], planned: Planned) -> None:
    assert planned({"plan": FULL}, inputs)[0] == planned({"plan": FULL}, inputs)[0]


def test_declaring_the_stage_loads_no_torch() -> None:
    code = "import sys; import stages.plan.stage; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_page_shows_the_phases_and_what_an_earlier_segment_really_took(
    inputs: dict[str, Artifact], planned: Planned, tmp_path: Path
) -> None:
    work = LocalWork(tmp_path / "c", {"curve": "curve"})
    write_table(work._place("curve") / "data.arrow", CURVE.schema, {name: [] for name in CURVE.schema.names})
    timing = {"step": [1, 2, 2], "what": ["step", "step", "evaluation"], "seconds": [1.0] * 3, "tokens": [9] * 3,
              "peak_bytes": [5 * 2**30, 7 * 2**30, 9 * 2**30]}  # fmt: skip
    write_table(work.measured("curve", "timing.arrow"), TIMING, timing)
    _, made, _ = planned({"plan": FULL}, {**inputs, "curve": [work.artifact("curve")]})
    page = made.measured("plan", "plan.html").read_text()
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    bars = {trace["name"]: trace for trace in figures["figure0"]["data"]}
    assert set(bars) == {"process", "weights", "moments", "gradients", "activations", "measured"}
    assert bars["measured"]["y"] == [7.0]
    assert bars["weights"]["y"][0] == pytest.approx(260_032 * 4 / 2**30, rel=1e-3)
    assert "Pareto front" in {trace["name"] for trace in figures["figure1"]["data"]}


@pytest.mark.shared
def test_a_plan_says_what_scoring_takes_where_memory_has_a_limit(pin: ModelPin, given: Any, planned: Any) -> None:
    inputs = given(pin, pool=token_columns(random_rows(40, 64)))
    limited = planned({"budget": {"peak_bytes": 2 * 2**30}}, inputs)[0]
    assert limited.allowed_bytes == int(2 * 2**30 * 0.9)
    assert limited.score_bytes["forward"] < limited.score_bytes["backward"] < limited.peak_bytes
    assert not limited.short_of_memory(1)
    assert limited.model_copy(update={"allowed_bytes": limited.score_bytes["backward"] - 1}).short_of_memory(1)
    free = planned({}, inputs)[0]
    assert free.allowed_bytes is None
    assert free.score_bytes == {}


def test_influence_in_training_is_refused_with_a_technique_that_cannot_give_it_before_anything_is_done() -> None:
    settings = {"seed": 0, "budget": {}, "train": {"influence": "segment"}}
    parse_slice(STAGE, {**settings, "plan": {"techniques": [{"method": "full"}, {"method": "qlora"}]}})
    with pytest.raises(ConfigError, match="badam is another"):
        parse_slice(STAGE, {**settings, "plan": {"techniques": [{"method": "lora"}, {"method": "badam"}]}})


@pytest.mark.shared
def test_any_precision_takes_the_other_one_and_then_frozen_weights_in_four_bits_where_nothing_before_fits(
    inputs: dict[str, Artifact], planned: Planned
) -> None:
    pytest.importorskip("bitsandbytes")
    plan = {"headroom": 0, "precision": "any", "techniques": [{"method": "lora", "r": 4}], "savings": []}
    free = planned({"plan": plan}, inputs)[0]
    assert {item["precision"] for item in free.considered} == {free.precision}
    with pytest.raises(DoesNotFitError) as caught:
        planned({"plan": plan, "budget": {"peak_bytes": 1}}, inputs)
    least = planned({"plan": plan, "budget": {"peak_bytes": caught.value.needed_bytes}}, inputs)[0]
    ways = {(item["technique"], item["precision"]) for item in least.considered}
    assert {("lora", "float32"), ("lora", "bfloat16"), ("qlora", least.precision)} <= ways
    assert (least.technique["method"], least.technique["r"]) == ("qlora", 4)
    assert not any(item["fits"] for item in least.considered if item["technique"] == "lora")


def test_no_plan_spreads_a_model_whose_influence_is_read_in_training(
    inputs: dict[str, Artifact], planned: Planned
) -> None:
    plan = {**FULL, "savings": ["shard"], "headroom": 0, "micro_batches": [4], "precision": "float32"}
    train = {"workers": 2, "influence": "segment"}
    with pytest.raises(DoesNotFitError) as refused:
        planned({"plan": plan, "train": train, "budget": {"peak_bytes": 1}}, inputs)
    assert "spread" not in str(refused.value)  # which is the least without influence


def test_what_no_plan_reads_plans_nothing_anew() -> None:
    def read(**budget: Any) -> dict[str, Any]:
        config = PlanSlice.model_validate({"seed": 0, "plan": {}, "train": {}, "budget": budget})
        return STAGE.external(config, Path())

    assert read(money=5, seconds=9, price={"hour": 2}) == read(price={"hour": 3}) == read()
    assert read(flops=5) != read() != read(peak_bytes=5)
