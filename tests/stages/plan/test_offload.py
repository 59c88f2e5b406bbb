"""What waits in main memory is not the device's: traced here with a "meta" device in main memory's place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from data_contracts.config import PlanConfig, TrainConfig
from data_contracts.errors import DoesNotFitError
from stages.plan.estimate import Estimator
from stages.plan.search import search
from stages.plan.trace import Shape
from tests.stages.technique.setting import pinned, technique

PLAIN = Shape(technique("full"), "float32", 24, 10, False)


@pytest.fixture(scope="module")
def estimator(tmp_path_factory: pytest.TempPathFactory) -> Estimator:
    folder: Path = tmp_path_factory.mktemp("models")
    return Estimator(pinned(folder / "five", 5, hidden=64), TrainConfig(), "cpu", host="meta")


def test_moments_in_main_memory_take_one_parameters_room(estimator: Estimator) -> None:
    plain = estimator.phases(PLAIN, 2, 2)["update"]
    parked = estimator.phases(replace(PLAIN, optimizer_states="host"), 2, 2)["update"]
    assert plain.moments > 2 * plain.weights * 0.99
    assert parked.moments < 0.01 * plain.moments  # counters
    largest = 4 * 64 * 64
    assert parked.total - parked.moments <= plain.total - plain.moments + 2 * largest + 1024


def test_activations_in_main_memory_leave_a_block_at_a_time(estimator: Estimator) -> None:
    plain = estimator.phases(PLAIN, 4, 2)
    away = estimator.phases(replace(PLAIN, offload_activations=True), 4, 2)
    assert away["backward"].activations < 0.45 * plain["backward"].activations
    assert away["forward"].activations < 0.45 * plain["forward"].activations


def test_the_plan_offloads_where_nothing_else_fits_and_only_beside_an_accelerator(estimator: Estimator) -> None:
    savings = ("offload_states", "offload_activations")
    plan = PlanConfig(micro_batches=(2,), headroom=0.0, savings=savings)
    settings = {"window": 4, "workers": 0}
    plain = estimator.price(PLAIN, 2, 2).peak_bytes
    chosen, ways = search(estimator, [PLAIN], plan, limit=plain - 1, **settings)
    assert chosen.savings
    assert set(chosen.savings) <= {"moments in main memory", "activations in main memory"}
    assert chosen.tokens_per_second < next(way for way in ways if way.shape == PLAIN).tokens_per_second
    both = min(ways, key=lambda way: way.peak_bytes)
    assert both.savings == ["moments in main memory", "activations in main memory"]
    alone = replace(estimator, host=None)
    with pytest.raises(DoesNotFitError):
        search(alone, [PLAIN], plan, limit=plain - 1, **settings)
