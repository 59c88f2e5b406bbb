"""What a batch selector adds to a plan: against real looks, their allocations and operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from data_contracts.config import TrainConfig
from data_contracts.errors import ConfigError, DoesNotFitError
from data_contracts.records import ModelPin
from stages.admission import parse_slice
from stages.model.batch import Row, collate
from stages.model.load import load_model
from stages.plan.estimate import Estimator
from stages.plan.stage import STAGE
from stages.stage import Artifact
from stages.technique.batch_selector import batch_selector_of
from stages.technique.looking import Given, Looking, look_passes, sizes_of
from stages.technique.recompute import recompute
from tests.stages.plan.conftest import random_rows, token_columns
from tests.stages.plan.test_estimate import shape_of

GREATS: dict[str, Any] = {"method": "greats", "dimensions": 1024}
COLM: dict[str, Any] = {"method": "colm"}


@pytest.mark.shared
@pytest.mark.parametrize("selector", [GREATS, COLM], ids=["greats", "colm"])
@pytest.mark.parametrize("blocks", [(), (0, 1, 2, 3)])
def test_a_real_look_holds_no_more_than_the_plan_says_and_takes_the_operations_it_says(
    pin: ModelPin, selector: dict[str, Any], blocks: tuple[int, ...]
) -> None:
    train = TrainConfig(batch_selector=selector)
    estimator, shape = Estimator(pin, train, "cpu"), shape_of("full")
    phase = estimator.phases(shape, 4, 2, blocks)["select"]
    chosen, model = batch_selector_of(train), load_model(pin)
    assert chosen is not None
    recompute(model, blocks)
    sizes = sizes_of(model, chosen.read(model))
    assert sizes == estimator.read(shape.technique)
    passes, priced = look_passes(model, list(sizes)), estimator.look(shape, blocks)
    length = shape.row_tokens
    assert priced.train(4, length, 3) == pytest.approx(passes.train(4, length, 3), rel=1e-6)

    named = dict(model.named_parameters())
    moments = {name: (torch.zeros_like(named[name]), torch.ones_like(named[name])) for name in sizes}
    direction = {name: torch.ones_like(named[name]) for name in sizes} if chosen.reads_target else {}
    given = Given(moments, 1, 0.9, 0.999, 1e-8, direction, 10.0)
    mask = np.arange(length) >= length - shape.answers
    draw = np.random.default_rng(0)
    batch = collate([Row(str(n), draw.integers(3, 250, length), mask) for n in range(4)])

    def look() -> torch.Tensor:
        with Looking(chosen, model, sizes, given, "float32") as looking:
            number_nK = torch.zeros(16, looking.numbers)
            number_nK[:4] = looking.of(batch)
        return number_nK

    look()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        look()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    handed_out = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).max()
    assert handed_out <= phase.activations
    if chosen.reads_target:  # its passes go through all layers, as training's do
        assert handed_out >= 0.75 * phase.activations
        assert phase.moments == Estimator(pin, TrainConfig(), "cpu").phases(shape, 4, 2)["forward"].moments + 4 * sum(
            sizes.values()
        )


@pytest.mark.shared
def test_a_pass_is_priced_with_looks_at_all_rows_and_training_on_a_share(
    pin: ModelPin, given: Any, planned: Any
) -> None:
    inputs = given(pin, pool=token_columns(random_rows(*[20, 30] * 16)), target=token_columns(random_rows(12, 16)))
    settings = {"plan": {"techniques": [{"method": "full"}], "precision": "float32", "window": 4}}
    plain = planned(settings, inputs)[0]
    model = load_model(pin)
    for selector, share, steps in (({**GREATS, "every": 2}, 2, 4), ({**COLM, "candidates": 4}, 4, 2)):
        plan = planned({**settings, "train": {"batch_selector": selector}}, inputs)[0]
        chosen = batch_selector_of(TrainConfig(batch_selector=selector))
        assert chosen is not None
        sizes = sizes_of(model, chosen.read(model))
        look = look_passes(model, list(sizes))
        looks = sum(look.train(1, n, n - n // 2) + chosen.row_flops(sizes) for n in [20, 30] * 16)
        whole = plain.pass_flops / share + looks
        if chosen.reads_target:  # a direction every other of four steps
            from stages.meter.flops import FlopModel

            passes = FlopModel.trace(model.requires_grad_(True), train=True)
            whole += steps / 2 * sum(passes.train(1, n, n - n // 2) for n in (12, 16))
        assert plan.pass_flops == pytest.approx(whole, rel=1e-3)


@pytest.mark.shared
def test_no_plan_uses_what_rows_cannot_be_picked_with(pin: ModelPin, given: Any, planned: Any) -> None:
    inputs: dict[str, Artifact] = given(pin, pool=token_columns(random_rows(*[20] * 8)))
    plan = {"techniques": [{"method": "full"}], "savings": ["states_mini"], "micro_batches": [1]}
    least = []
    for selector in (None, COLM):
        train = {"batch_selector": selector}
        with pytest.raises(DoesNotFitError) as refused:
            planned({"plan": plan, "train": train, "budget": {"peak_bytes": 1}}, inputs)
        least.append(refused.value.found)
    assert "one second moment" in least[0]
    assert "one second moment" not in least[1]


def test_techniques_that_give_no_gradients_of_their_own_are_refused_before_anything_is_done() -> None:
    settings = {"seed": 0, "budget": {}, "train": {"batch_selector": COLM}}
    parse_slice(STAGE, {**settings, "plan": {"techniques": [{"method": "full"}, {"method": "lora"}]}})
    with pytest.raises(ConfigError, match="mezo is another"):
        parse_slice(STAGE, {**settings, "plan": {"techniques": [{"method": "full"}, {"method": "mezo"}]}})
    train = {"batch_selector": GREATS, "influence": "segment"}
    with pytest.raises(ConfigError, match="one direction of the target"):
        parse_slice(STAGE, {**settings, "train": train, "plan": {"techniques": [{"method": "full"}]}})
    with pytest.raises(ConfigError, match="candidate"):
        parse_slice(STAGE, {**settings, "train": {"batch_selector": COLM | {"candidate": 3}}, "plan": {}})
