"""Robust fit of a formula with positive constants: Huber on log loss, L-BFGS from a grid of starts, a bootstrap.

Minimises Σ Huber_δ(ln L̂ − ln L), the sum and not the mean: with the mean, L-BFGS stops early at its default tolerance
(Besiroglu et al. 2024, arXiv 2404.10102). Derivatives are complex steps, exact to rounding. The grid is ranked by the
objective and L-BFGS started from its lowest places. The method is approach 3 of Hoffmann et al. 2022 (arXiv
2203.15556). Inside, a constant named `log_…` is itself, any other its logarithm. Shapes: P constants, R runs, T starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize

DELTA = 1e-3
"""Residual of the log loss from which an error counts linearly."""
DESCENTS = 4
"""Places of the grid that are descended from."""
OPTIONS = {"ftol": 1e-12, "maxiter": 150}
STEP = 1e-30
LARGE = 1e9
"""What the objective is where the formula is not finite."""

Formula = Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], Any]


class Objective:
    """The sum of Huber losses and its gradient over the free constants; `weight_R` counts each run (bootstrap)."""

    def __init__(
        self, formula: Formula, constants: Mapping[str, float], free: Sequence[str], runs: Mapping[str, np.ndarray]
    ) -> None:
        self.formula, self.fixed, self.free, self.runs = formula, dict(constants), tuple(free), runs
        self.log_R = np.log(runs["loss"])
        self.weight_R = np.ones(len(self.log_R))

    def constants(self, theta_P: np.ndarray) -> dict[str, Any]:
        """Return all constants; `theta_P` may have any further axes, which the free ones keep with one for the runs."""
        with np.errstate(over="ignore"):
            moved = {
                name: (value if name.startswith("log_") else np.exp(value))[..., None]
                for name, value in zip(self.free, theta_P, strict=True)
            }
        return {**self.fixed, **moved}

    def place(self, constants: Mapping[str, float]) -> np.ndarray:
        """Return the coordinates of `constants`, (P,)."""
        return np.array([constants[n] if n.startswith("log_") else np.log(constants[n]) for n in self.free])

    def value(self, theta_PT: np.ndarray) -> np.ndarray:
        """Return the objective at each of T places."""
        with np.errstate(all="ignore"):
            residual_TR = np.log(self.formula(self.constants(theta_PT), self.runs)) - self.log_R
            value_T = _huber(residual_TR) @ self.weight_R
        return np.where(np.isfinite(value_T), value_T, LARGE)

    def __call__(self, theta_P: np.ndarray) -> tuple[float, np.ndarray]:
        residual_R, slope_PR = self.slopes(theta_P)
        with np.errstate(all="ignore"):
            value = float(_huber(residual_R) @ self.weight_R)
        if not np.isfinite(value) or not np.isfinite(slope_PR).all():
            return LARGE, np.zeros(len(theta_P))
        return value, slope_PR @ (np.clip(residual_R, -DELTA, DELTA) * self.weight_R)

    def slopes(self, theta_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the residuals (R,) of the log loss and their derivatives (P, R)."""
        stepped_PP = theta_P[:, None] + 1j * STEP * np.eye(len(theta_P))
        with np.errstate(all="ignore"):
            log_PR = np.log(self.formula(self.constants(stepped_PP), self.runs))
        return log_PR[0].real - self.log_R, log_PR.imag / STEP

    def descend(self, start_P: np.ndarray) -> tuple[float, np.ndarray]:
        """Return (objective, place) where L-BFGS ends from `start_P`, in coordinates that make the bowl round.

        The coordinates are those of the Gauss–Newton matrix at the start; a second descent renews them.
        """
        value, place_P = float("inf"), start_P
        for _ in range(2):
            _, slope_PR = self.slopes(place_P)
            curvature_PP = (slope_PR * self.weight_R) @ slope_PR.T
            if not np.isfinite(curvature_PP).all():
                return LARGE, start_P
            scale, turn_PP = np.linalg.eigh(curvature_PP)
            axes_PP = turn_PP / np.sqrt(np.maximum(scale, scale[-1] * 1e-9 + 1e-12))
            origin_P = place_P

            def turned(z_P: np.ndarray, axes: np.ndarray = axes_PP, at: np.ndarray = origin_P) -> Any:
                height, slope_P = self(at + axes @ z_P)
                return height, axes.T @ slope_P

            found = minimize(turned, np.zeros(len(place_P)), jac=True, method="L-BFGS-B", options=OPTIONS)
            value, place_P = float(found.fun), origin_P + axes_PP @ found.x
        return value, place_P


def _huber(residual: np.ndarray) -> np.ndarray:
    size = np.abs(residual)
    return np.where(size <= DELTA, 0.5 * size**2, DELTA * (size - 0.5 * DELTA))


def minimise(
    formula: Formula,
    constants: Mapping[str, float],
    free: Sequence[str],
    starts: Mapping[str, Sequence[float]],
    runs: Mapping[str, np.ndarray],
) -> dict[str, float]:
    """Return all constants, the `free` ones where the objective is lowest.

    Args:
        constants: the values that are kept, and one of the starts.
        starts: constant → values of the grid.
        runs: the columns of the formula and `loss`, each (R,).
    """
    objective = Objective(formula, constants, free, runs)
    lattice = itertools.product(*(starts.get(name, (constants[name],)) for name in free))
    places = [objective.place(dict(zip(free, values, strict=True))) for values in lattice]
    own_P = objective.place(constants)
    grid_PT = np.stack([own_P, *places], axis=1)
    ranked = np.argsort(objective.value(grid_PT), kind="stable")[:DESCENTS]
    ends = [objective.descend(grid_PT[:, at]) for at in sorted({0, *ranked.tolist()})]
    _, best_P = min(ends, key=lambda end: end[0])
    return {name: float(np.squeeze(value)) for name, value in objective.constants(best_P).items()}


def bootstrap(
    formula: Formula,
    fitted: Mapping[str, float],
    free: Sequence[str],
    runs: Mapping[str, np.ndarray],
    resamples: int,
    rng: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Return each constant's values over resamples of the runs, each descended to from the fit on all of them."""
    objective = Objective(formula, fitted, free, runs)
    start_P, count = objective.place(fitted), len(objective.log_R)
    draws = {name: np.full(resamples, value) for name, value in fitted.items()}
    for resample in range(resamples):
        objective.weight_R = rng.multinomial(count, np.full(count, 1 / count)).astype(np.float64)
        _, place_P = objective.descend(start_P)
        for name, value in objective.constants(place_P).items():
            draws[name][resample] = float(np.squeeze(value))
    return draws
