"""A plan that spreads a model over workers: bytes of one rank from shallow traces, and what fits no worker alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_contracts.config import PlanConfig, TrainConfig
from data_contracts.errors import DoesNotFitError
from data_contracts.records import ModelPin
from stages.plan.estimate import Estimator
from stages.plan.search import search
from stages.plan.trace import Shape, trace_step
from tests.stages.technique.setting import pinned, technique


@pytest.fixture(scope="module")
def pin(tmp_path_factory: pytest.TempPathFactory) -> ModelPin:
    folder: Path = tmp_path_factory.mktemp("models")
    return pinned(folder / "six", 6, hidden=64)


@pytest.fixture(scope="module")
def estimator(pin: ModelPin) -> Estimator:
    return Estimator(pin, TrainConfig(), "cpu")


SPREAD = Shape(technique("full"), "float32", 24, 10, False, shards=2)


def test_pieces_of_four_layers_make_a_ranks_trace_at_full_depth(pin: ModelPin, estimator: Estimator) -> None:
    found = estimator.phases(SPREAD, 5, 2)
    whole = trace_step(pin, SPREAD, TrainConfig(), layers=6, rows=5, device="cpu")
    late = estimator._lingering(SPREAD)  # of gloo: measured, not traced
    for name, phase in found.items():
        if name != "load":
            assert phase.total - phase.process - late == whole.peak(name), name


def test_a_rank_holds_half_and_loads_the_whole(estimator: Estimator) -> None:
    phases = estimator.phases(SPREAD, 5, 2)
    alone = estimator.phases(Shape(technique("full"), "float32", 24, 10, False), 5, 2)["update"]
    for name in ("weights", "moments"):
        assert getattr(phases["update"], name) == pytest.approx(getattr(alone, name) / 2, rel=0.01)
    assert phases["backward again"].gradients <= 0.6 * alone.weights
    assert phases["load"].total - phases["load"].process == alone.weights


def test_a_model_that_fits_no_worker_alone_fits_two(estimator: Estimator) -> None:
    shape = Shape(technique("full"), "float32", 24, 10, False)
    settings = {"window": 4, "workers": 2}
    plan = PlanConfig(micro_batches=(2,), headroom=0.0, savings=())
    with pytest.raises(DoesNotFitError) as refused:
        search(estimator, [shape], plan, limit=estimator.phases(shape, 2, 1)["update"].process, **settings)
    needed = refused.value.needed_bytes
    assert needed is not None
    allowed = plan.model_copy(update={"savings": ("shard",)})
    chosen, ways = search(estimator, [shape], allowed, limit=needed - 1, **settings)
    assert chosen.shape.shards == 2
    assert chosen.savings == ["spread over 2 workers"]
    assert chosen.tokens_per_second < ways[-1].tokens_per_second or len(ways) == 2
    enough, _ = search(estimator, [shape], allowed, limit=needed, **settings)
    assert enough.shape.shards == 1  # nothing is spread where the plain way fits
    with pytest.raises(DoesNotFitError):  # one worker has no other to spread to
        search(estimator, [shape], allowed, limit=needed - 1, window=2, workers=0)
