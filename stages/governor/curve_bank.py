"""What a falling curve will buy: a bank of shapes fitted to its evaluations, averaged by how well each explains them.

Every shape is e + a·φ(x) with e, a ≥ 0 and φ falling, so no fit can rise: whether the loss rises is told by
`rise_since_best`, and a flat fit then means nothing. The shapes' own exponents and scales are a grid that zooms to
where the likelihood is; for each cell e and a are linear, so the whole bank is a few matrix products. A cell's weight
is its likelihood, each shape having the same weight before. Doubt comes from a bootstrap of blocks of residuals, each
resample drawing a cell by its weights.
Families: Domhan et al. 2015 and the prior of Adriaensen et al. 2023 (arXiv 2310.20447); in loss form Hill and
log-power are `mmf`, exp4 is `weibull`. Shapes: P evaluations, T cells, B resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stages.governor.laws.muennighoff import DATA_DECAY, effective

BLOCK_POWER = 1 / 3
HUBER = 1.345
"""Residuals beyond so many robust standard deviations weigh less."""
SIDE = {1: 31, 2: 13}
"""Cells along each parameter of a shape with so many."""
FAR, ZOOMS = 8.0, 12
"""Log likelihood below the best at which a cell is left out, and how often the grid is drawn anew at most."""
LEAST = 1e-7
"""Relative noise below which a fit counts as exact."""


@dataclass(frozen=True)
class Shape:
    """A falling φ(x, θ) and the box that θ is looked for in.

    Args:
        phi: (x (P, 1), θ (T, K)) → (P, T); x is in units of what has been spent so far.
        low_K, high_K: of the logarithms of its K parameters.
    """

    phi: Callable[[np.ndarray, np.ndarray], np.ndarray]
    low_K: tuple[float, ...]
    high_K: tuple[float, ...]

    def at(self, x_P: np.ndarray, log_theta_TK: np.ndarray) -> np.ndarray:
        """Return φ, (P, T)."""
        return self.phi(x_P[:, None], np.exp(log_theta_TK))


_EXPONENT, _SCALE, _POWER, _SHIFT = (-3.0, 1.0), (-1.5, 4.5), (-1.0, 1.2), (-4.0, 0.5)

BANK: Mapping[str, Shape] = {
    "pow3": Shape(lambda x, t: x ** -t[:, 0], *zip(_EXPONENT, strict=True)),
    "pow4": Shape(lambda x, t: (x + t[:, 1]) ** -t[:, 0], *zip(_EXPONENT, _SHIFT, strict=True)),
    "mmf": Shape(lambda x, t: 1 / (1 + (t[:, 0] * x) ** t[:, 1]), *zip(_SCALE, _POWER, strict=True)),
    "weibull": Shape(lambda x, t: np.exp(-((t[:, 0] * x) ** t[:, 1])), *zip(_SCALE, _POWER, strict=True)),
    "ilog": Shape(lambda x, t: 1 / np.log1p(t[:, 0] * x), *zip(_SCALE, strict=True)),
}


@dataclass(frozen=True)
class FittedCurve:
    """Draws of a curve.

    Args:
        weights: shape → share of the resamples' weight; they sum to 1.
        unit: of x, the FLOPs (or tokens) that count as 1.
        shapes, theta: of the bank in its order, and the (T, K) cells of each.
        cell_B, floor_B, size_B: each draw's cell, counted through all shapes, its e and its a.
    """

    weights: Mapping[str, float]
    unit: float
    shapes: tuple[Shape, ...]
    theta: tuple[np.ndarray, ...]
    cell_B: np.ndarray
    floor_B: np.ndarray
    size_B: np.ndarray

    def loss(self, flops: float) -> np.ndarray:
        """Return the loss at `flops` in each draw, (B,)."""
        x_1 = np.array([flops / self.unit])
        phi_T = np.concatenate([shape.at(x_1, t)[0] for shape, t in zip(self.shapes, self.theta, strict=True)])
        return np.asarray(self.floor_B + self.size_B * phi_T[self.cell_B])

    def powers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (E, a, b), (B,) each, of the draws e + a·x^−b in FLOPs; only of a fit of the shape `pow3` alone."""
        if self.shapes != (BANK["pow3"],):
            raise TypeError("a bank of other shapes has no exponent: fit it with shapes=('pow3',)")
        b_B = np.exp(self.theta[0][self.cell_B, 0])
        return self.floor_B, self.size_B * self.unit**b_B, b_B

    def gain(self, now: float, then: float, level: float = 0.8) -> tuple[float, float, float]:
        """Return (median, low, high) of the loss that going from `now` to `then` takes off, nats, never below 0."""
        drop_B = self.loss(now) - self.loss(then)
        middle, low, high = np.quantile(drop_B, [0.5, (1 - level) / 2, (1 + level) / 2])
        return float(middle), float(low), float(high)


def fit_curve(
    flops: Sequence[float] | np.ndarray,
    loss: Sequence[float] | np.ndarray,
    rng: np.random.Generator,
    *,
    resamples: int = 100,
    shapes: Sequence[str] = tuple(BANK),
) -> FittedCurve | None:
    """Fit the bank to a curve; None for fewer than four evaluations at FLOPs above 0.

    Args:
        flops: (P,) rising, or effective tokens; those at 0 are left out.
        loss: (P,) nats.
        rng: of the bootstrap.
        resamples: B.
        shapes: of the bank; ("pow3",) alone is the parametric fit E + a·C^−b.
    """
    x_P, y_P = np.asarray(flops, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    x_P, y_P = x_P[x_P > 0], y_P[x_P > 0]
    if len(x_P) < 4:
        return None
    unit = float(x_P.max())
    bank = tuple(BANK[name] for name in shapes)
    boxes = [_zoom(shape, x_P / unit, y_P) for shape in bank]
    theta = tuple(box[0] for box in boxes)
    phi_TP = np.concatenate([shape.at(x_P / unit, t) for shape, t in zip(bank, theta, strict=True)], axis=1).T
    prior_T = np.concatenate([np.full(len(t), log_share - math.log(len(t))) for t, log_share in boxes])
    weight_P = np.ones(len(x_P))
    for _ in range(2):  # once to find the wild points, once without their pull
        floor_TB, size_TB, rss_TB = _solve(phi_TP, y_P[:, None], weight_P)
        best = int(np.argmin(rss_TB[:, 0]))
        fitted_P = floor_TB[best, 0] + size_TB[best, 0] * phi_TP[best]
        residual_P = y_P - fitted_P
        spread = 1.4826 * float(np.median(np.abs(residual_P))) + LEAST * float(np.abs(y_P).mean())
        weight_P = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(residual_P), LEAST * spread))
    inflated_P = residual_P * math.sqrt(len(x_P) / (len(x_P) - 3))
    drawn_PB = fitted_P[:, None] + _blocks(inflated_P, resamples, rng)
    floor_TB, size_TB, rss_TB = _solve(phi_TP, drawn_PB, weight_P)
    log_TB = prior_T[:, None] + _likelihood(rss_TB, y_P, weight_P)
    share_TB = np.exp(log_TB - log_TB.max(axis=0))
    share_TB /= share_TB.sum(axis=0)
    cell_B = (share_TB.cumsum(axis=0) < rng.random(resamples)).sum(axis=0).clip(max=len(phi_TP) - 1)
    ends = np.cumsum([0, *(len(t) for t in theta)])
    mean_T = share_TB.mean(axis=1)
    weights = {name: float(mean_T[ends[i] : ends[i + 1]].sum()) for i, name in enumerate(shapes)}
    draw_B = np.arange(resamples)
    return FittedCurve(weights, unit, bank, theta, cell_B, floor_TB[cell_B, draw_B], size_TB[cell_B, draw_B])


def _likelihood(rss: np.ndarray, y_P: np.ndarray, weight_P: np.ndarray) -> np.ndarray:
    """Return −(n/2)·ln(RSS), the log likelihood at the best noise, which is at least `LEAST` of the loss."""
    least = len(y_P) * (LEAST * float(np.abs(y_P).mean())) ** 2
    return np.asarray(-0.5 * weight_P.sum() * np.log(rss + least))


def _zoom(shape: Shape, x_P: np.ndarray, y_P: np.ndarray) -> tuple[np.ndarray, float]:
    """Return (cells (T, K), log of the box's share of the whole box) where the likelihood is not negligible.

    The box shrinks to the cells within `FAR` of the best one, and one around them, until it shrinks no more.
    """
    low_K, high_K = np.array(shape.low_K), np.array(shape.high_K)
    whole = float(np.log(high_K - low_K).sum())
    for _ in range(ZOOMS):
        cells_TK = _grid(low_K, high_K)
        rss_T = _solve(shape.at(x_P, cells_TK).T, y_P[:, None], np.ones(len(y_P)))[2][:, 0]
        log_T = _likelihood(rss_T, y_P, np.ones(len(y_P)))
        near_TK = cells_TK[log_T > log_T.max() - FAR]
        step_K = (high_K - low_K) / (SIDE[len(low_K)] - 1)
        smaller_low, smaller_high = (
            np.maximum(low_K, near_TK.min(axis=0) - step_K),
            np.minimum(high_K, near_TK.max(axis=0) + step_K),
        )
        shrinks = np.log(smaller_high - smaller_low).sum() < np.log(high_K - low_K).sum() - 0.3
        low_K, high_K = smaller_low, smaller_high
        if not shrinks:
            break
    return _grid(low_K, high_K), float(np.log(high_K - low_K).sum()) - whole


def _grid(low_K: np.ndarray, high_K: np.ndarray) -> np.ndarray:
    sides = [np.linspace(low, high, SIDE[len(low_K)]) for low, high in zip(low_K, high_K, strict=True)]
    return np.stack([axis.ravel() for axis in np.meshgrid(*sides, indexing="ij")], axis=1)


def _solve(phi_TP: np.ndarray, y_PB: np.ndarray, weight_P: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (e, a, residual sum of squares), each (T, B), of weighted least squares with e ≥ 0 and a ≥ 0."""
    total = weight_P.sum()
    mean_T, mean_B = phi_TP @ weight_P / total, weight_P @ y_PB / total
    phi_TP_c, y_PB_c = phi_TP - mean_T[:, None], y_PB - mean_B
    square_T = (phi_TP_c**2) @ weight_P
    cross_TB = (phi_TP_c * weight_P) @ y_PB_c
    all_B = weight_P @ y_PB_c**2
    size_TB = np.maximum(0.0, cross_TB / np.maximum(square_T, np.finfo(float).tiny)[:, None])
    floor_TB = mean_B - size_TB * mean_T[:, None]
    rss_TB = all_B - size_TB * cross_TB
    full_T, raw_TB = (phi_TP**2) @ weight_P, (phi_TP * weight_P) @ y_PB
    below_TB = floor_TB < 0  # the floor is at its bound: a alone
    alone_TB = raw_TB / np.maximum(full_T, np.finfo(float).tiny)[:, None]
    rss_alone_TB = weight_P @ y_PB**2 - alone_TB * raw_TB
    return (
        np.where(below_TB, 0.0, floor_TB),
        np.where(below_TB, alone_TB, size_TB),
        np.maximum(0.0, np.where(below_TB, rss_alone_TB, rss_TB)),
    )


def _blocks(residual_P: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Return (P, B) residuals in blocks of P^(1/3) neighbours, drawn with replacement round the ring."""
    count = len(residual_P)
    length = max(1, round(count**BLOCK_POWER))
    starts = rng.integers(count, size=(math.ceil(count / length), resamples))
    places = (starts[:, None, :] + np.arange(length)[None, :, None]) % count
    return np.asarray(residual_P[places.reshape(-1, resamples)[:count]])


def effective_tokens(tokens: Sequence[float], unique: float) -> np.ndarray:
    """Return what tokens seen so far are worth in fresh ones where only `unique` are different (Muennighoff's law)."""
    seen_P = np.asarray(tokens, dtype=np.float64)
    different_P = np.minimum(seen_P, unique)
    again_P = np.where(different_P > 0, seen_P / np.maximum(different_P, 1e-300) - 1, 0.0)
    return effective(different_P, again_P, DATA_DECAY)
