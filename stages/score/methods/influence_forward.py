"""Forward-only influence: the same number as `influence`, from losses alone, without a backward pass over the pool.

⟨gᵢ, d⟩ with d = D Ḡⱼ is the derivative of the example's loss ℓᵢ along d, so [ℓᵢ(θ + εd) − ℓᵢ(θ − εd)] / 2ε gives it up
to ε² and to rounding / ε. No activation is kept, nothing is hooked: it works where the model cannot be tapped or a
backward pass does not fit. A group costs two forward passes, or one where `difference` is one-sided (and one for all
groups together, error ε instead of ε²). ε is chosen for each group by its measured error: on some target rows, against
the exact product of their gradients. Weights are written from a saved copy, so that none drifts and all come back
bit for bit. Source: Malladi et al. 2023 (MeZO) for the difference, Xia et al. 2024 (LESS) for what is differentiated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from stages.score.scorer import Block, Given, Scorer
from stages.score.target import preconditioned, target_batches, target_directions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from stages.model.batch import TokenBatch

STEPS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Steps tried, as ε‖d‖ / ‖θ‖ over the weights that d moves: small ones drown in rounding, large ones are not linear."""
ROUGH = 0.1
"""A relative error of this much is told to the user."""


class InfluenceForward(Scorer):
    """Derivative of the example's loss along the preconditioned mean gradient of the target, by finite difference."""

    reads = frozenset({"tokens", "model", "moments"})
    passes = "forward"
    grouped = True

    per: Literal["visit", "token"] = Field(
        "visit", description="What the score is worth: one visit of the example, or each of its answer tokens."
    )
    difference: Literal["central", "one_sided"] = Field(
        "central", description="Two passes a group and error ε², or one (plus one for all groups) and error ε."
    )
    calibration_rows: int = Field(
        16, ge=1, le=1024, description="Target rows on which ε is chosen and its error measured."
    )

    def prepare(self, given: Given) -> Differences:
        """Compute each group's direction and choose its ε; the summary gets ε and error.

        Raises `InputError` where there is no target, or a target row has no token to predict.
        """
        assert given.trained is not None
        found = Differences(
            given.trained.model, target_directions(given), given.autocast, central=self.difference == "central"
        )
        every = np.unique(np.concatenate(given.members))
        rows = every[np.linspace(0, len(every) - 1, min(self.calibration_rows, len(every))).astype(int)]
        error_J = _calibrate(found, given, rows)
        given.trained.moments.clear()
        given.facts["step"] = ", ".join(f"{step:g}" for step in found.step_J)
        given.facts["step_error"] = ", ".join(f"{error:.2g}" for error in error_J)
        if max(error_J) > ROUGH:
            given.notice(
                f"influence_forward: the best step is off by {max(error_J):.0%} of the products on {len(rows)} target "
                "rows; use `influence`, or plan for float32"
            )
        return found

    def score(self, block: Block, state: Differences) -> np.ndarray:
        """Return score_BJ; NaN where nothing is predicted."""
        import torch

        batch = block.tokens
        product_DJ, loss_sum_D, answer_tokens_D = state.of(batch)
        for _ in range(state.passes - 1):  # the engine counts one
            block.meter.forward(batch)
        block.note_losses(loss_sum_D, answer_tokens_D)
        tokens_D1 = answer_tokens_D[:, None].double()
        unit_D1 = tokens_D1 if self.per == "token" else torch.ones_like(tokens_D1)
        score_DJ = product_DJ / unit_D1.masked_fill(tokens_D1 == 0, float("nan"))
        return np.asarray(score_DJ.float().cpu())


@dataclass
class Differences:
    """Directional derivatives of the summed answer losses of a batch's documents, by forward passes alone.

    Attributes:
        directions: by parameter name, (J, *parameter.shape); parameters that are not named stay where they are.
        central: whether both θ + εd and θ − εd are evaluated, or θ + εd and θ.
        step_J: ε‖d‖ / ‖θ‖ of each group.
    """

    model: Any
    directions: dict[str, Tensor]
    autocast: torch.dtype | None
    central: bool

    def __post_init__(self) -> None:
        named = dict(self.model.named_parameters())
        self._moved = [(named[name], direction) for name, direction in self.directions.items()]
        self._saved = [parameter.detach().clone() for parameter, _ in self._moved]
        weights = sum(float(value.double().square().sum()) for value in self._saved) ** 0.5
        self.groups = len(self._moved[0][1])
        self._unit_J = [
            weights / max(1e-300, sum(float(d[j].double().square().sum()) for _, d in self._moved) ** 0.5)
            for j in range(self.groups)
        ]
        self.step_J = [STEPS[0]] * self.groups

    @property
    def passes(self) -> int:
        """Forward passes that one batch takes."""
        return 2 * self.groups if self.central else self.groups + 1

    def of(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return product_DJ (float64), loss_sum_D (central: the mean of both sides, off by ε²) and answer_tokens_D."""
        import torch

        here_N = None if self.central else self._losses(batch)
        columns, middle_N = [], here_N
        for group in range(self.groups):
            epsilon = self.step_J[group] * self._unit_J[group]
            with self._at(group, epsilon):
                ahead_N = self._losses(batch)
            if here_N is None:
                with self._at(group, -epsilon):
                    behind_N = self._losses(batch)
                middle_N = (ahead_N + behind_N) / 2 if middle_N is None else middle_N
                columns.append((ahead_N - behind_N) / (2 * epsilon))
            else:
                columns.append((ahead_N - here_N) / epsilon)
        assert middle_N is not None
        owner_N, documents = batch.answers.document_N, len(batch.example_ids)
        slope_NJ = torch.stack(columns, dim=1)
        product_DJ = slope_NJ.new_zeros(documents, self.groups).index_add_(0, owner_N, slope_NJ)
        loss_D = middle_N.new_zeros(documents).index_add_(0, owner_N, middle_N)
        return product_DJ, loss_D, torch.bincount(owner_N, minlength=documents)

    def _losses(self, batch: TokenBatch) -> Tensor:
        """Return the loss of each answer token in float64: differences are taken before anything is summed."""
        import torch

        from stages.model.loss import logit_chunk, token_losses

        device, chunk = batch.input_ids_BT.device.type, logit_chunk(self.model)
        with torch.no_grad(), torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
            return token_losses(self.model, batch, chunk_tokens=chunk).double()

    @contextmanager
    def _at(self, group: int, epsilon: float) -> Iterator[None]:
        """Stand at θ + epsilon·d; on leaving, whatever happened, every weight is again what it was, bit for bit."""
        import torch

        try:
            with torch.no_grad():
                for (parameter, direction), saved in zip(self._moved, self._saved, strict=True):
                    parameter.copy_(torch.add(saved, direction[group].to(saved.dtype), alpha=epsilon))
            yield
        finally:
            with torch.no_grad():
                for (parameter, _), saved in zip(self._moved, self._saved, strict=True):
                    parameter.copy_(saved)


def _calibrate(found: Differences, given: Given, rows: np.ndarray) -> list[float]:
    """Set each group's step to that of least error on these target rows; return the errors.

    The exact products come from one gradient a row (counted as training passes). Errors are relative to the products
    of these rows with the rest of their group: with the whole group a target row's product holds its own norm, which
    no pool row's does, and the error would look smaller than it is.
    """
    from stages.gradients.precondition import mean_gradient

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
    error_SJ = np.zeros((len(STEPS), found.groups))
    for batch in target_batches(given, rows):
        exact_DJ = np.stack([exact[example_id] for example_id in batch.example_ids])
        for trial, step in enumerate(STEPS):
            found.step_J = [step] * found.groups
            error_SJ[trial] += ((found.of(batch)[0].cpu().numpy() - exact_DJ) ** 2).sum(axis=0)
            for _ in range(found.passes):
                given.meter.forward(batch)
    error_SJ = np.sqrt(error_SJ / np.maximum(size_J, np.finfo(np.float64).tiny))
    best_J = np.where(np.isfinite(error_SJ), error_SJ, np.inf).argmin(axis=0)
    found.step_J = [STEPS[best] for best in best_J]
    return [float(error_SJ[best, group]) for group, best in enumerate(best_J)]
