"""BAOC: the assignment against all assignments, risks against float64, the budget kept, and a life that is
interrupted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from data_contracts.config import TrainConfig
from data_contracts.errors import ConfigError
from stages.plan.estimate import Estimator
from stages.plan.trace import Shape
from stages.technique.assign import assign
from stages.technique.mixed_states import FormsAdamW
from stages.technique.states import has_8bit
from stages.technique.step import trainable
from tests.stages.technique.setting import life, pinned, put_back, started, technique, windows

SETTINGS = {"method": "baoc", "state_share": 0.7, "probe_steps": 2}


@pytest.fixture(scope="module")
def pin(tmp_path_factory):
    return pinned(tmp_path_factory.mktemp("models") / "wide", 2, hidden=192)


def brute_force(blocks, budget):
    found = []
    for places in itertools.product(*(range(len(options)) for options in blocks)):
        taken = [options[place] for options, place in zip(blocks, places, strict=True)]
        if sum(size for size, _ in taken) <= budget:
            found.append(sum(risk for _, risk in taken))
    return min(found, default=None)


def test_no_other_assignment_within_the_budget_has_less_risk():
    draw, refused = np.random.default_rng(0), 0
    for number in range(300):
        alike = number % 2
        sizes = [draw.integers(1, 40, 4) for _ in range(5)]
        blocks = [
            [(int(size), float(risk)) for size, risk in zip(sizes[0] if alike else each, draw.random(4), strict=True)]
            for each in sizes
        ]
        budget = int(draw.integers(5, 150))
        expected, places = brute_force(blocks, budget), assign(blocks, budget)
        if expected is None:
            refused += 1
            assert places is None
            continue
        taken = [options[place] for options, place in zip(blocks, places, strict=True)]
        assert sum(size for size, _ in taken) <= budget
        assert sum(risk for _, risk in taken) == pytest.approx(expected, rel=1e-12)
    assert 0 < refused < 250


def test_a_forms_risk_is_its_updates_error_in_float64_and_grows_with_what_it_throws_away():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 64))
    settings = {"lr": 1.0, "betas": (0.9, 0.99), "eps": 1e-8}
    optimizer = FormsAdamW([weight], {}, **settings)
    even = [torch.randn(64, 1).sign() * torch.randn(64, 64).sign() for _ in range(3)]
    spread = [item * torch.logspace(-2, 0, 64) for item in even]
    assert optimizer.risk(weight, "float32", spread) == 0
    assert optimizer.risk(weight, "mini", even) < 1e-9
    first = second = block = torch.zeros(64, 64, dtype=torch.float64)
    off = scale = 0.0
    for step, gradient in enumerate((item.double() for item in spread), start=1):
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        block = 0.99 * block + 0.01 * (gradient**2).mean(1, keepdim=True)
        exact, other = (first / (1 - 0.9**step) / ((v / (1 - 0.99**step)).sqrt() + 1e-8) for v in (second, block))
        off, scale = off + (exact - other).square().sum(), scale + exact.square().sum()
    assert optimizer.risk(weight, "mini", spread) == pytest.approx(float(off / scale), rel=1e-3)
    assert optimizer.risk(weight, "4bit", spread) > 0.01
    if has_8bit():
        assert optimizer.risk(weight, "8bit", spread) < optimizer.risk(weight, "4bit", spread)


def test_after_the_probe_the_forms_are_the_best_within_the_budget_and_take_no_more(pin):
    optimizer = started(technique(**SETTINGS), pin)
    seen = {}
    assigned = optimizer._assigned

    def noting():
        samples = optimizer.forms.samples
        for place, block in enumerate(optimizer.blocks):
            for name in optimizer.forms.forms:
                risks = [item.numel() * optimizer.forms.risk(item, name, samples[item]) for item in block.values()
                         if item in samples]  # fmt: skip
                seen[place, name] = (optimizer.sizes[place][name], sum(risks))
        return assigned()

    optimizer._assigned = noting
    for number, window in enumerate(windows(4)):
        assert bool(optimizer.chosen) == (number >= 2)
        optimizer.step(window, 1e-3, clip=1.0)
    names = list(optimizer.forms.forms)
    blocks = [[seen[place, name] for name in names] for place in range(len(optimizer.blocks))]
    risk = sum(seen[place, name][1] for place, name in enumerate(optimizer.chosen))
    assert risk == pytest.approx(brute_force(blocks, optimizer.budget), rel=1e-12)
    assert len(set(optimizer.chosen)) > 1
    held = sum(value.nbytes for name, value in optimizer.held().items() if not name.startswith("step."))
    numbers = sum(item.numel() for item in trainable(optimizer.model).values())
    assert held <= optimizer.budget == int(0.7 * 8 * numbers)
    assert held > 0.8 * optimizer.budget


def test_a_life_interrupted_in_or_after_the_probe_ends_in_the_same_bytes(pin, tmp_path):
    whole = life(technique(**SETTINGS), pin, 4, killed_after=None, folder=tmp_path)
    assert whole.chosen
    for after in (1, 3):
        again = life(technique(**SETTINGS), pin, 4, killed_after=after, folder=tmp_path / str(after))
        assert again.plain() == whole.plain()
        for one, other in ((whole.weights(), again.weights()), (whole.held(), again.held())):
            assert set(one) == set(other)
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_from_before_the_assignment_is_put_back(pin, tmp_path):
    put_back(technique(**SETTINGS), pin, tmp_path)


def test_a_plan_counts_the_whole_budget_and_a_share_that_is_too_small_is_refused(pin):
    shape = Shape(technique(**SETTINGS), "float32", 24, 10, False)
    phases = Estimator(pin, TrainConfig(), "cpu").phases(shape, 2, 2)
    assert {phase.moments for phase in phases.values()} == {int(0.7 * 8 * pin.parameters)}
    with pytest.raises(ConfigError, match="state_share"):
        started(technique("baoc", state_share=0.1), pin)
