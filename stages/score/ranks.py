"""The ranks of thin factors: as small as a measured error allows, or the directions as they are.

A row of the target is in its own group's direction, and what is cut off hides from it: on such rows the error looks up
to its square. So it is measured between halves: the direction of one half of each group is cut, rows of the other half
are multiplied with what is cut off. Every wide layer is cut where the same share of its norm lies beyond, the largest
share at which that error stays within the limit; the whole group's direction is then cut at this share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from stages.gradients.low_rank import Factors, Spectrum, factored, wide_layers
from stages.gradients.precondition import mean_gradient
from stages.score.scorer import Given
from stages.score.target import target_batches, target_directions

if TYPE_CHECKING:
    from torch import Tensor

WIDE_SIDE = 512
"""The least side of a layer for which thin products run at the speed of their operations."""
LEAST_ROWS, SAMPLE_ROWS = 4, 16
"""Rows on which an error is measured, at least and at most."""
SHARES = tuple(0.85**power for power in range(1, 31))
"""Of a direction's norm, tried from the first."""


def low_rank(given: Given, directions: dict[str, Tensor], *, limit: float, rows: int) -> dict[str, Factors]:
    """Return the factors of those layers that are cut, and take their directions out of `directions`.

    Args:
        limit: the largest error, of any group: norm of what the sampled rows' products lose, over that of the products.
        rows: rows that will be scored at least: finding out must cost less than it can save on these.

    What finding out takes is counted; `facts` says what came of it. Memory: the halves' directions, as large as all of
    `directions`, until it is done.
    """
    assert given.trained is not None
    assert given.target is not None
    wide = wide_layers(given.trained.model, directions, WIDE_SIDE)
    sample = np.unique(np.concatenate([members[1::2] for members in given.members]))
    sample = sample[np.linspace(0, len(sample) - 1, min(SAMPLE_ROWS, len(sample))).astype(int)]
    halves = [members[::2] for members in given.members]
    alone = any(np.isin(sample, half).any() for half in halves)  # a row of two groups
    if not wide or len(sample) < LEAST_ROWS or alone:
        return {}
    shapes = {name: _sides(directions[name], turned) for name, turned in wide.items()}
    most = {name: max(1, outputs * inputs // (2 * (outputs + inputs))) for name, (outputs, inputs) in shapes.items()}
    cost = _cost(shapes, most, len(halves), len(sample))
    passes = 3 * (len(sample) + sum(len(half) for half in halves))  # of the layers, rows of the target's length
    length = float(np.mean(given.target.lengths))
    if cost >= sum(2 * o * i for o, i in shapes.values()) * length * (rows - passes):
        return {}
    given.meter.add(cost)

    def spectra_of(found: dict[str, Tensor]) -> dict[str, list[Spectrum]]:
        return {
            name: [Spectrum.of(one.mT if turned else one, most[name], given.seed) for one in found[name]]
            for name, turned in wide.items()
        }

    half = target_directions(replace(given, members=tuple(halves)))
    spectra = spectra_of(half)
    whole: dict[str, list[np.ndarray]] = {name: [] for name in wide}
    terms: dict[str, list[np.ndarray]] = {name: [] for name in wide}
    size_J = np.zeros(len(halves))
    for index in range(len(sample)):
        (batch,) = target_batches(given, sample[index : index + 1])
        given.meter.train(batch)
        gradient, _, _ = mean_gradient(given.trained.model, [batch], autocast=given.autocast)
        answers = len(batch.answers.label_N)  # the gradient is that of the mean
        product_J = {
            name: answers * (half[name].flatten(1).double() @ value.flatten().double()).cpu().numpy()
            for name, value in gradient.items()
        }
        size_J += sum(product_J.values()) ** 2
        for name, turned in wide.items():
            value = answers * gradient[name]
            whole[name].append(product_J[name])
            terms[name].append(np.stack([one.terms(value.mT if turned else value) for one in spectra[name]]))
    del half
    for share in SHARES:
        ranks = _cut(spectra, shapes, share)
        lost_SJ = np.zeros((len(sample), len(halves)))
        for name, rank_J in ranks.items():
            kept_SJ = np.stack(terms[name])[:, np.arange(len(halves)), np.array(rank_J) - 1]
            lost_SJ += np.stack(whole[name]) - kept_SJ
        error = float(np.sqrt((lost_SJ**2).sum(axis=0) / np.maximum(size_J, np.finfo(np.float64).tiny)).max())
        if error <= limit:
            break
    else:
        ranks = {}
    if ranks:  # else it is nothing that was measured
        spectra = spectra_of(directions)
        ranks = {name: rank_J for name, rank_J in _cut(spectra, shapes, share).items() if name in ranks}
    given.facts["low_rank_layers"] = f"{len(ranks)} of {len(wide)}"
    if ranks:
        kept = sum(sum(ranks[name]) * sum(shapes[name]) for name in ranks)
        given.facts["low_rank_share"] = round(kept / sum(o * i for o, i in (shapes[name] for name in ranks)), 3)
        given.facts["low_rank_error"] = f"{error:.2g}"
    for name in ranks:
        del directions[name]
    return {name: factored(spectra[name], rank_J) for name, rank_J in ranks.items()}


def _sides(direction_Joi: Tensor, turned: bool) -> tuple[int, int]:
    """Return (outputs, inputs)."""
    first, second = direction_Joi.shape[1:]
    return (second, first) if turned else (first, second)


def _cost(shapes: dict[str, tuple[int, int]], most: dict[str, int], groups: int, rows: int) -> int:
    """Return the operations of decomposing halves and wholes, and of the sampled rows' products with all terms."""
    return sum(
        groups * (2 * Spectrum.flops(outputs, inputs, most[name]) + 2 * rows * outputs * inputs * most[name])
        for name, (outputs, inputs) in shapes.items()
    )


def _cut(spectra: dict[str, list[Spectrum]], shapes: dict[str, tuple[int, int]], share: float) -> dict[str, list[int]]:
    """Return the ranks a group of each layer that is cheaper cut at this share than one exact contraction."""
    found = {}
    for name, several in spectra.items():
        ranks = [rank for rank in (one.rank(share) for one in several) if rank is not None]
        outputs, inputs = shapes[name]
        if len(ranks) == len(several) and sum(ranks) * (outputs + inputs) < outputs * inputs:
            found[name] = ranks
    return found
