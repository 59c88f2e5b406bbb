"""What the model must not forget, evaluated beside validation and compared with where the run began.

The reference is the run's first evaluation: of this segment before its first step, or a table of an earlier one's
losses. Both evaluations read the same documents, so the error of the rise is that of their paired differences. What a
rise means is decided by `stages.governor.state.forgotten` and, for the run, by the governor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from data_contracts.arrow import read_table
from data_contracts.errors import ArtifactError
from stages.governor.state import Retention, forgotten
from stages.meter.flops import FlopModel
from stages.train.job import Job
from stages.train.rows import read_chunks
from stages.train.validate import Loss, Validation, ratio_estimate
from stages.workers.group import Group

LOSSES = "retention_losses"


@dataclass(frozen=True)
class Retained:
    """One evaluation: the loss, the standard error of its rise above the reference, whether too much is forgotten."""

    loss: Loss
    rise_se: float | None
    forgot: bool


class Retaining:
    """The retention rows and the reference.

    Args:
        rows: what is evaluated.
        allowed: nats that the loss may rise; None: any.
        reference_D: nats of each document where the run began; None: the first evaluation is the reference.
    """

    def __init__(self, rows: Validation, allowed: float | None, reference_D: torch.Tensor | None) -> None:
        self._rows, self._allowed, self._reference_D = rows, allowed, reference_D
        self.tokens = rows.tokens
        self.began: Retention | None = None
        """Where the loss began; None before the first evaluation."""

    @classmethod
    def of(cls, job: Job, batch_tokens: int, chunks: Sequence[str], folder: Path) -> Retaining | None:
        """Return that of a segment, None where it has no retention set.

        Args:
            job: says where rows and reference lie, and what is allowed.
            batch_tokens: padded tokens a forward pass.
            chunks, folder: of the rows that a life before this one wrote, where it made the reference itself.

        Raises `ArtifactError` where the reference is of other documents.
        """
        if job.places.retention is None:
            return None
        rows = Validation(Path(job.places.retention), job.train.validation_rows, batch_tokens, job.plan.loss_chunks)
        given = job.places.reference
        table = read_table(Path(given)) if given else next(read_chunks(folder, chunks, LOSSES), None)
        if table is None:
            return cls(rows, job.most_forgotten, None)
        steps, sums, answers = (table.column(name).to_numpy() for name in ("step", "loss_sum", "answer_tokens"))
        first = steps == steps[:1]
        if not np.array_equal(answers[first], rows.answers_D):
            raise ArtifactError(
                "a reference of the documents that are watched now",
                f"it is of {first.sum()} other ones; {rows.documents} are watched",
                "keep `data.retention` and `train.validation_rows` over a run",
            )
        return cls(rows, job.most_forgotten, torch.tensor(sums[first]))

    def flops(self, meter: FlopModel) -> int:
        """Return the forward FLOPs of one evaluation, padding included."""
        return self._rows.flops(meter)

    def __call__(self, model: nn.Module, group: Group, precision: str) -> tuple[Retained, torch.Tensor]:
        """Evaluate `model` as `Validation` does; the ranks return the same."""
        loss, found = self._rows(model, group, precision)
        if self._reference_D is None:
            self._reference_D = found[0]
        if self.began is None:
            first = ratio_estimate(self._reference_D, found[1])
            self.began = Retention(first.mean, first.se, self._allowed)
        rise_se = ratio_estimate(found[0] - self._reference_D, found[1]).se
        return Retained(loss, rise_se, forgotten(loss.mean - self.began.loss, rise_se, self._allowed)), found
