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
from stages.plan.trace import Shape, trace_step
from stages.technique import states, states_4bit
from stages.technique.assign import assign
from stages.technique.mixed_states import SCALARS, FormsAdamW, RiskAdam, form_names, form_of
from stages.technique.states import has_8bit
from stages.technique.step import trainable
from tests.stages.technique.setting import handed_out, life, pinned, put_back, started, technique, windows

SETTINGS = {"method": "baoc", "state_share": 0.7, "probe_steps": 2}


@pytest.fixture(scope="module")
def pin(tmp_path_factory):
    return pinned(tmp_path_factory.mktemp("models") / "wide", 2, hidden=192)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return pinned(tmp_path_factory.mktemp("models") / "deep", 5, hidden=192)


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


@pytest.mark.parametrize("piece", [2**20, 4096])
@pytest.mark.parametrize("shape", [(96, 192), (192,)])
def test_an_update_holds_what_its_form_says(monkeypatch, shape, piece):
    for module in (states, states_4bit):
        monkeypatch.setattr(module, "PIECE", piece)
    for name in form_names():
        weight = nn.Parameter(torch.randn(shape))
        form = form_of(name, [weight], {}, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8})
        weight.grad, form.state[weight] = torch.randn(shape), form.empty_state(weight)
        said = form.scratch(weight, "cpu")
        assert said <= handed_out(form.step) <= said + SCALARS, name


def maximal(optimizer):
    """Return assignments within the budget that hold a block in each form that fits, the others as dearly as they can."""
    names, found = list(optimizer.forms.forms), set()
    for first, name in itertools.product(range(len(optimizer.sizes)), names):
        for order in (1, -1):
            left = optimizer.budget - sum(size["4bit"] for size in optimizer.sizes)
            chosen = ["4bit"] * len(optimizer.sizes)
            others = [place for place in range(len(chosen)) if place != first][::order]
            for place in (first, *others):
                size = optimizer.sizes[place]
                forms = [name] if place == first else names
                fits = [form for form in forms if size[form] - size["4bit"] <= left]
                if not fits:
                    break
                left -= size[fits[0]] - size["4bit"]
                chosen[place] = fits[0]
            else:
                found.add(tuple(chosen))
    return sorted(found)


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_no_assignment_within_the_budget_updates_in_more_than_the_plan_made_of_few_layers_says(deep, share):
    settings = {"state_share": share, "probe_steps": 1}
    shape = Shape(technique("baoc", **settings), "float32", 8, 4, False)
    phase = Estimator(deep, TrainConfig(), "cpu").phases(shape, 2, 2)["update"]
    optimizer = started(technique("baoc", **settings), deep)
    numbers = sum(item.numel() for item in optimizer.forms.form)
    seen = []
    for chosen in maximal(optimizer):
        optimizer.forms.state.clear()
        optimizer._put(chosen)
        held = sum(item.nbytes for each in super(RiskAdam, optimizer).stand().values() for item in each)
        for item in optimizer.forms.form:
            item.grad = torch.ones_like(item)
        assert held <= phase.moments == optimizer.budget
        seen.append(phase.weights + 4 * numbers + held + handed_out(optimizer.adamw.step))
    predicted = phase.total - phase.process
    assert 0.95 * predicted < max(seen) <= predicted
    assert min(seen) < max(seen)


def test_a_real_life_takes_no_more_than_its_plan_from_the_probe_to_the_last_change_of_forms(deep):
    shape = Shape(technique(**SETTINGS), "float32", 20, 20, False)
    phases = Estimator(deep, TrainConfig(), "cpu").phases(shape, 2, 2)
    predicted = max(phase.total - phase.process for phase in phases.values())
    optimizer, given = started(technique(**SETTINGS), deep), windows(4)
    assert max(batch.shape[1] for window in given for batch in window) == 20
    weights = sum(item.nbytes for item in (*optimizer.model.parameters(), *optimizer.model.buffers()))
    batches = 3 * 8 * 20 * 2 * 2 * len(given)  # a batch's answers are made when they are first asked for, and stay

    def work():
        for window in given:
            optimizer.step(window, 1e-3, clip=1.0)

    taken = weights + handed_out(work)
    assert set(optimizer.chosen) - {"4bit"}
    assert 0.9 * predicted < taken <= predicted + batches


def test_pieces_of_few_layers_are_never_below_a_trace_of_all_of_them(deep):
    shape = Shape(technique(**SETTINGS), "float32", 20, 10, False)
    every = tuple(range(deep.layers))
    phases = Estimator(deep, TrainConfig(), "cpu").phases(shape, 2, 2, every)
    whole = trace_step(deep, shape, TrainConfig(), layers=deep.layers, rows=2, device="cpu", recomputed=every)
    for name, phase in phases.items():
        unfilled = phase.moments - whole.moments  # of the budget, by the forms that there are
        assert unfilled >= 0
        assert whole.peak(name) <= phase.total - phase.process < 1.02 * (whole.peak(name) + unfilled), name
