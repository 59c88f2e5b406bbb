"""The fitted loss surface recovers a planted one; its penalised least is the simplex's, by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stages.mix.surface import HUBER, Surface, _huber, choose, fit

PLANTED = Surface(np.array([0.3, -0.2]), np.array([[0.9, -0.5, 0.4], [-0.3, 0.8, 0.2]]))


def test_a_planted_surface_is_recovered_where_it_was_not_seen():
    rng = np.random.default_rng(3)
    x = np.vstack([np.eye(3), rng.dirichlet(np.ones(3), 20)])
    found = fit(x, PLANTED(x), rng, starts=2)
    fresh = rng.dirichlet(np.ones(3), 50)
    assert np.abs(found(fresh) - PLANTED(fresh)).max() < 1e-3


def test_one_wild_loss_does_not_bend_the_fit():
    rng = np.random.default_rng(4)
    x = np.vstack([np.eye(3), rng.dirichlet(np.ones(3), 20)])
    y = PLANTED(x)
    y[7] += 3.0
    found = fit(x, y, rng, starts=2)
    assert np.abs(found(x[:7]) - PLANTED(x[:7])).max() < 0.02


def test_the_fits_gradient_is_that_of_its_loss():
    rng = np.random.default_rng(5)
    x, values = rng.dirichlet(np.ones(3), 9), np.array([0.2, 0.5, -0.4, 0.1])
    y = np.exp(0.2) + np.exp(x @ values[1:]) + rng.normal(0, 2 * HUBER, 9)
    _, gradient = _huber(values, x, y)
    for at in range(4):
        step = np.eye(4)[at] * 1e-6
        slope = (_huber(values + step, x, y)[0] - _huber(values - step, x, y)[0]) / 2e-6
        assert gradient[at] == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("penalty", [0.01, 0.05, 1.0])
def test_the_choice_is_the_least_of_the_simplex(penalty):
    prior = np.array([0.5, 0.3, 0.2])
    steps = 200
    points = np.array(
        [(i, j, steps - i - j) for i, j in itertools.product(range(steps + 1), repeat=2) if i + j <= steps]
    )
    grid = points / steps

    def objective(x):
        inside = np.where(x > 0, x * np.log(np.maximum(x, 1e-300) / prior), 0.0)
        return np.exp(x @ PLANTED.t_JP.T).mean(axis=-1) + penalty * inside.sum(axis=-1)

    found = choose(PLANTED, prior, penalty)
    assert found.sum() == pytest.approx(1)
    assert objective(found[None])[0] <= objective(grid).min() + 1e-9
    assert np.abs(found - grid[objective(grid).argmin()]).max() < 0.02


def test_a_heavy_penalty_keeps_the_prior_and_no_prior_no_share():
    prior = np.array([0.5, 0.5, 0.0])
    assert choose(PLANTED, prior, 1e4) == pytest.approx(prior, abs=1e-3)
    assert choose(PLANTED, prior, 0.05)[2] == 0.0
