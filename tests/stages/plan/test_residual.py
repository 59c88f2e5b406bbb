"""What earlier segments held past predictions: when it counts, and what the next plan makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_contracts.errors import DoesNotFitError
from data_contracts.records import MemoryUse, ModelPin, Plan
from stages.governor.reallocation import USE
from stages.plan.residual import learnt
from stages.stage import Artifact, Inputs
from tests.local_work import LocalWork
from tests.stages.plan.conftest import random_rows, token_columns
from tests.stages.train.small import plan_of

CURVE: dict[str, list[Any]] = {
    "step": [1], "phase": ["stable"], "epoch": [0.0], "tokens": [1], "flops": [1], "train_loss": [1.0],
    "validation_loss": [None], "validation_se": [None], "gradient_norm": [1.0], "gradient_noise": [None],
    "learning_rate": [1e-3], "update_ratio": [None], "promised_loss": [None], "guard": ["off"], "guard_scale": [1.0],
    "guard_action": ["none"],
}  # fmt: skip
Segment = Callable[..., Artifact]


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    """Make the curve of a segment that held what is said."""
    made = 0

    def make(predicted: int, allowed: int | None, measured: int, *, ran_out: bool = False, device: str = "cpu") -> Any:
        nonlocal made
        made += 1
        work = LocalWork(tmp_path / f"segment-{made}", {"curve": "curve"})
        work.table("curve", CURVE)
        use = MemoryUse(
            device=device, predicted_bytes=predicted, allowed_bytes=allowed, measured_bytes=measured, ran_out=ran_out
        )
        work.measured("curve", USE).write_text(use.model_dump_json())
        return work.artifact("curve")

    return make


def test_only_segments_that_broke_what_was_allowed_on_this_device_count(segment: Segment) -> None:
    kept = [segment(100, 150, 149), segment(100, None, 900)]
    found = learnt(kept, None, "cpu")
    assert (found.bytes, found.below, found.past) == (0, None, 800)
    assert found.of(1000, 0.1) == 0
    broke = segment(100, 150, 160)
    assert learnt([*kept, broke, segment(100, 150, 400, device="cuda")], None, "cpu").bytes == 60
    assert learnt([], None, "cpu").past is None


def test_a_way_like_one_that_memory_ran_out_in_is_not_allowed_again(segment: Segment) -> None:
    found = learnt([segment(700, 900, 600, ran_out=True), segment(800, 900, 600, ran_out=True)], None, "cpu")
    assert found.bytes == 0
    assert int(1000 * 0.9) - found.of(1000, 0.1) == 699


def test_a_later_run_takes_over_what_the_newest_plan_of_the_store_knew(segment: Segment, tmp_path: Path) -> None:
    plan = Plan(
        technique={"method": "full"}, precision="float32", micro_batch=1, accumulation=1, packed=False, row_tokens=8,
        workers=0, trainable=1, peak_bytes=1, phases={}, flops_per_token=1, flops_per_token_forward=1, pass_flops=1,
        tokens_per_second=1.0, why="", considered=(), residual_bytes=50,
    )  # fmt: skip
    work = LocalWork(tmp_path / "earlier", {"plan": "plan"})
    work.record("plan", plan)
    earlier = Inputs({"plan": (work.artifact("plan"),)})
    assert learnt([], earlier, "cpu").bytes == 50
    both = Inputs({"plan": (work.artifact("plan"),), "curve": (segment(100, 150, 170),)})
    assert learnt([], both, "cpu").bytes == 70


def test_a_way_that_memory_ran_out_in_is_remembered_as_such_whatever_the_next_budget(tmp_path: Path) -> None:
    work = LocalWork(tmp_path, {"plan": "plan"})
    work.record("plan", plan_of(allowed_bytes=39_999, residual_bytes=32_001, ran_out_bytes=40_000))
    found = learnt([], Inputs({"plan": (work.artifact("plan"),)}), "cpu")
    assert (found.bytes, found.below) == (0, 40_000)
    assert (found.of(40_000, 0.1), found.of(100_000, 0.1)) == (0, 50_001)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[]", b'{"device": "cpu"}'])
def test_a_file_that_cannot_be_read_says_nothing(segment: Segment, text: bytes) -> None:
    curve = segment(1, 1, 900)
    curve.measured(USE).write_bytes(text)
    assert learnt([curve], None, "cpu").past is None


@pytest.mark.shared
def test_the_next_plan_allows_so_much_less_says_so_and_never_refuses_for_it_alone(
    pin: ModelPin, given: Any, planned: Any, segment: Segment
) -> None:
    inputs = given(pin, pool=token_columns(random_rows(10, 64, 20, 30)))
    plan = {"headroom": 0, "techniques": [{"method": "full"}], "savings": []}
    free = planned({"plan": plan}, inputs)[0]
    limit = free.peak_bytes
    first = planned({"plan": plan, "budget": {"peak_bytes": limit}}, inputs)[0]
    assert (first.micro_batch, first.residual_bytes) == (free.micro_batch, 0)
    curve = segment(limit, limit, limit + 1000)
    next_plan, _, summary = planned({"plan": plan, "budget": {"peak_bytes": limit}}, {**inputs, "curve": curve})
    assert next_plan.residual_bytes == summary.facts["residual_bytes"] == 1000
    assert next_plan.allowed_bytes == limit - 1000
    assert next_plan.micro_batch < free.micro_batch
    assert summary.measured["most_bytes_past_prediction"] == 1000
    ran_out = segment(limit, None, limit // 2, ran_out=True)
    smaller = planned({"plan": plan}, {**inputs, "curve": ran_out})[0]
    assert smaller.peak_bytes < limit
    least = planned({"plan": plan}, {**inputs, "curve": segment(1, None, 1, ran_out=True)})
    assert least[0].micro_batch == free.micro_batch
    assert any("ran out of memory" in item and "planned without" in item for item in least[1].notices)
    hopeless = segment(1, 1, 10 * limit)
    same, work, _ = planned({"plan": plan, "budget": {"peak_bytes": limit}}, {**inputs, "curve": hopeless})
    assert (same.micro_batch, same.residual_bytes) == (free.micro_batch, 0)
    assert any("planned without" in item for item in work.notices)
    with pytest.raises(DoesNotFitError):
        planned({"plan": plan, "budget": {"peak_bytes": 1}}, {**inputs, "curve": hopeless})
