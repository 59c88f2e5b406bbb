"""Ridge against the normal equations, its leave-one-out errors against leaving one out, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from stages.statistics.ridge import PENALTIES, cross_validated, fit


def explicit(given: np.ndarray, response: np.ndarray, penalty: float, new: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Solve (XᵀX + λI) w = Xᵀy with an unpenalised intercept, predictors scaled as in `like`."""
    scale = like.std(axis=0)
    x, y = given / scale, response
    centred = x - x.mean(axis=0)
    weight = np.linalg.solve(centred.T @ centred + penalty * np.eye(x.shape[1]), centred.T @ (y - y.mean(axis=0)))
    return (new / scale - x.mean(axis=0)) @ weight + y.mean(axis=0)


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    given = random.normal(size=(30, 5)) * [1, 10, 0.1, 3, 1] + [0, 5, 0, -2, 1]
    return given, given @ random.normal(size=(5, 2)) + random.normal(size=(30, 2))


def test_a_fit_solves_the_penalised_normal_equations(data) -> None:
    given, response = data
    found = fit(given, response)
    np.testing.assert_allclose(
        found.predict(given[:7] + 1), explicit(given, response, found.penalty, given[:7] + 1, given), rtol=1e-9
    )


def test_left_out_predictions_are_those_of_fits_without_the_row(data) -> None:
    given, response = data
    found = fit(given, response)
    for row in range(0, 30, 5):
        rest = np.delete(np.arange(30), row)
        alone = explicit(given[rest], response[rest], found.penalty, given[row : row + 1], given)
        np.testing.assert_allclose(found.left_out_nJ[row : row + 1], alone, rtol=1e-6)


def test_the_penalty_grows_with_noise_and_is_the_best_of_those_tried() -> None:
    random = np.random.default_rng(1)
    given = random.normal(size=(40, 20))
    clean, noise = given[:, :1], random.normal(size=(40, 1))
    assert fit(given, clean).penalty < fit(given, noise).penalty
    found = fit(given, clean + noise)
    errors = []
    for penalty in PENALTIES * 40:
        out = [
            explicit(np.delete(given, i, 0), np.delete(clean + noise, i, 0), penalty, given[i : i + 1], given)
            for i in range(40)
        ]
        errors.append(float(np.mean((np.concatenate(out) - clean - noise) ** 2)))
    assert found.penalty == pytest.approx(PENALTIES[int(np.argmin(errors))] * 40)


def test_cross_validation_never_sees_the_row_it_predicts(data) -> None:
    given, response = data
    before = cross_validated(given, response, 5, np.random.default_rng(3))
    changed = response.copy()
    changed[4] += 1e6
    after = cross_validated(given, changed, 5, np.random.default_rng(3))
    np.testing.assert_array_equal(before[4], after[4])
    assert not np.allclose(before, after)


def test_a_constant_predictor_takes_no_part(data) -> None:
    given, response = data
    with_one = np.concatenate([given, np.full((30, 1), 7.0)], axis=1)
    np.testing.assert_allclose(fit(with_one, response).predict(with_one), fit(given, response).predict(given))
