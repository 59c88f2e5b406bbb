"""The step of a finite difference: for each target group the one whose products are nearest to exact ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stages.gradients.differences import Differences
from stages.gradients.precondition import mean_gradient
from stages.score.scorer import Given
from stages.score.target import preconditioned, target_batches


def calibrate(found: Differences, given: Given, most_rows: int, steps: Sequence[float]) -> list[float]:
    """Set each group's step to that of least error, on at most `most_rows` target rows; return the errors.

    The exact products come from one gradient a row (counted as training passes). Errors are relative to the products
    of these rows with the rest of their group: with the whole group a target row's product holds its own norm, which
    no pool row's does, and the error would look smaller than it is.
    """
    every = np.unique(np.concatenate(given.members))
    rows = every[np.linspace(0, len(every) - 1, min(most_rows, len(every))).astype(int)]
    exact: dict[str, np.ndarray] = {}
    size_J = np.zeros(found.groups)
    for index, row in enumerate(rows):
        (batch,) = target_batches(given, rows[index : index + 1])
        gradient, _, _ = mean_gradient(found.model, [batch], autocast=given.autocast)
        given.meter.train(batch)
        answers = len(batch.answers.label_N)  # the gradient is that of the mean
        product_J = np.zeros(found.groups)
        for name, value in gradient.items():
            product_J += answers * (found.directions[name].flatten(1).double() @ value.flatten().double()).cpu().numpy()
        exact[batch.example_ids[0]] = product_J
        own = preconditioned(gradient, given)
        norm = answers * sum(float((gradient[name].double() * own[name]).sum()) for name in own)
        for group, members in enumerate(given.members):
            rest = len(members) - 1
            other = (product_J[group] * (rest + 1) - norm) / rest if rest and row in members else product_J[group]
            size_J[group] += other**2
    error_SJ = np.zeros((len(steps), found.groups))
    for batch in target_batches(given, rows):
        exact_DJ = np.stack([exact[example_id] for example_id in batch.example_ids])
        for trial, step in enumerate(steps):
            found.step_J = [step] * found.groups
            error_SJ[trial] += ((found.of(batch)[0].cpu().numpy() - exact_DJ) ** 2).sum(axis=0)
            for _ in range(found.passes):
                given.meter.forward(batch)
            given.meter.add(found.extra_flops(batch))
    error_SJ = np.sqrt(error_SJ / np.maximum(size_J, np.finfo(np.float64).tiny))
    best_J = np.where(np.isfinite(error_SJ), error_SJ, np.inf).argmin(axis=0)
    found.step_J = [steps[best] for best in best_J]
    return [float(error_SJ[best, group]) for group, best in enumerate(best_J)]
