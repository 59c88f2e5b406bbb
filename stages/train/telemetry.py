"""What each step and evaluation writes: a curve row, one row a visit, a timing row. For rank 0."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch

from stages.meter.memory import peak_bytes
from stages.technique.batch_selector import Picked
from stages.technique.step import StepResult
from stages.train.examples import Examples
from stages.train.guarding import Done
from stages.train.order import MicroBatch
from stages.train.position import Position, retention_columns
from stages.train.rows import Rows
from stages.train.validate import Loss
from stages.workers.group import Group


def losses_by_place(window: np.ndarray, mine: list[MicroBatch], result: StepResult, group: Group) -> torch.Tensor:
    """Return (loss sum, answer tokens, influence) of each place of the window over all ranks, float64.

    Shape (3, places); influence is NaN where it is not known.
    """
    found = torch.zeros(3, len(window), dtype=torch.float64)
    places = [place for micro in mine for place in micro.places]
    found[0, places] = result.document_loss_D.double().cpu()
    found[1, places] = result.document_tokens_D.double().cpu()
    found[2, places] = math.nan if result.document_product_D is None else result.document_product_D.cpu()
    placed = found.to(group.device)
    group.sum_([placed])
    return placed.cpu()


class Telemetry:
    """Writes a segment's rows.

    Args:
        rows: where they gather.
        start: steps of the run before this segment.
        at: the segment's position, read as it stands.
    """

    def __init__(self, rows: Rows, start: int, at: Position) -> None:
        self.rows, self._start, self._at = rows, start, at

    @property
    def run_step(self) -> int:
        """Steps of the run so far."""
        return self._start + self._at.step

    def visits(self, window: np.ndarray, examples: Examples, found: torch.Tensor) -> None:
        """Write a row a visit, two where its influence is known; one without a predicted answer token is left out."""
        for place, (loss, count, influence) in enumerate(found.T.tolist()):
            if not count:
                continue
            example_id = examples.row(int(window[place])).example_id
            visit = {"step": self.run_step, "position": place, "example_id": example_id}
            self.rows.add("example_losses", {**visit, "loss_sum": loss, "answer_tokens": int(count)})
            if math.isfinite(influence):
                known = {"influence": influence, "direction_step": self._at.direction_step}
                self.rows.add("example_influence", {**visit, **known})

    def choices(self, candidates: np.ndarray, examples: Examples, picked: Picked) -> None:
        """Write a row a candidate of the step."""
        gains = [None] * len(picked.places) if picked.gain_S is None else picked.gain_S.tolist()
        taken = dict(zip(picked.places.tolist(), zip(picked.weight_S.tolist(), gains, strict=True), strict=True))
        for place, row in enumerate(candidates):
            weight, gain = taken.get(place, (0.0, None))
            known = {"step": self.run_step, "position": place, "example_id": examples.row(int(row)).example_id}
            self.rows.add("example_choices", {**known, "chosen": place in taken, "weight": weight, "gain": gain})

    def documents(self, table: str, found: torch.Tensor) -> None:
        """Write a row a document of an evaluation; `found` (2, documents) are loss sums and answer tokens."""
        for document, (loss, count) in enumerate(found.T.tolist()):
            known = {"step": self.run_step, "document": document}
            self.rows.add(table, {**known, "loss_sum": loss, "answer_tokens": int(count)})

    def curve(
        self,
        result: StepResult | None,
        loss: Loss | None,
        *,
        phase: str,
        rate: float,
        epoch: float,
        noise: float | None,
        guarded: Done,
    ) -> None:
        """Write the row of a step, or (without `result`) of an evaluation before the first."""
        at = self._at
        self.rows.add(
            "curve",
            {
                "step": self.run_step,
                "phase": phase,
                "epoch": epoch,
                "tokens": at.tokens,
                "flops": at.spent.flops,
                "train_loss": result.loss if result else None,
                "validation_loss": loss.mean if loss else None,
                "validation_se": loss.se if loss else None,
                "gradient_norm": result.gradient_norm if result else None,
                "gradient_noise": noise if result and result.norms else None,
                "learning_rate": rate,
                "update_ratio": guarded.moved,
                "promised_loss": guarded.promised,
                "guard": guarded.regime,
                "guard_scale": guarded.scale,
                "guard_action": guarded.action,
                **retention_columns(loss.retained if loss else None),
            },
        )

    def timing(self, what: str, began: float, tokens: int) -> None:
        """Write how long a step, evaluation, direction or choice took since `began` (of the performance counter)."""
        row: dict[str, Any] = {"step": self.run_step, "what": what, "seconds": time.perf_counter() - began}
        self.rows.add("timing", {**row, "tokens": tokens, "peak_bytes": peak_bytes()})
