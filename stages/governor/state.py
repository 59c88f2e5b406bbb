"""What a run looks like to a policy: its evaluations along cumulative FLOPs, segment by segment.

A `State` is built from curve tables (or plain rows) and is all that a policy sees besides the remaining budget. It
promises that a loss which is not finite is kept and counted, and never compares as better. What the numbers mean for
the next step is the policy's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from data_contracts.direction import Direction
from stages.governor.reallocation import Reallocation

Z95 = 1.6448536269514722
"""95th percentile of the normal distribution."""


def outdone(loss: float, se: float | None, best: float, best_se: float | None) -> bool:
    """Return whether an end lies above the best evaluation beyond their error (one-sided, 95 %).

    Training goes on from an end that does not: at a constant rate the loss scatters about its course, and going back to
    the lowest evaluation would undo what was learnt since for a lucky draw.
    """
    return loss - best > Z95 * math.hypot(se or 0.0, best_se or 0.0)


def forgotten(rise: float, se: float | None, allowed: float | None) -> bool:
    """Return whether a loss on the retention set lies more than `allowed` above where the run began, beyond error
    (one-sided, 95 %). A rise that is not finite always does; without a limit nothing does.

    Args:
        rise: nats above the first evaluation.
        se: its standard error; None counts as none.
        allowed: nats, or None.
    """
    return allowed is not None and not rise - Z95 * (se or 0.0) <= allowed


@dataclass(frozen=True)
class Point:
    """One row of a curve.

    Args:
        step: optimizer steps since the start of the run.
        flops: spent since the start of the run, summed over segments.
        tokens: through the model since the start of the run, summed over segments.
        loss: the watched metric, turned so that lower is better; None = not evaluated here, NaN or ±inf = not finite.
        se: its standard error, in the same unit, or None.
        phase: warmup, stable or decay.
        segment: 0 is the warm-up segment of a run (or the only segment seen from inside training).
        train_loss: mean over the window's answer tokens, nats, or None.
        retention: loss on the retention set, nats, lower being better whatever the metric; None = not evaluated.
        retention_se: its standard error, or None.
        retention_rise_se: that of its rise above the run's first, document by document, where known.
    """

    step: int
    flops: int
    tokens: int
    loss: float | None
    se: float | None
    phase: str = "stable"
    segment: int = 0
    train_loss: float | None = None
    retention: float | None = None
    retention_se: float | None = None
    retention_rise_se: float | None = None

    @property
    def finite(self) -> bool:
        """Whether this is an evaluation with a finite loss."""
        return self.loss is not None and math.isfinite(self.loss)

    @property
    def broken(self) -> bool:
        """Whether a loss was computed here and is not finite."""
        return any(value is not None and not math.isfinite(value) for value in (self.loss, self.train_loss))


@dataclass(frozen=True)
class Drift:
    """What has moved under the latest selection, as far as something tells.

    Args:
        target_shared: share of the target's rows that the target of the latest selection had too; None: it is the same.
        agreement: Spearman's correlation of the two latest scorings; None where the latest segment was not scored anew.
        rows: over how many rows.
        answered: whether the latest selection was made because of drift.
    """

    target_shared: float | None = None
    agreement: float | None = None
    rows: int = 0
    answered: bool = False


@dataclass(frozen=True)
class Retention:
    """What a run may not forget: where its loss on the retention set began, and how far above that it may lie.

    Args:
        loss: of the first evaluation, nats.
        se: its standard error, or None.
        allowed: nats; None: any, the loss is only shown.
    """

    loss: float
    se: float | None = None
    allowed: float | None = None


@dataclass(frozen=True)
class State:
    """What has been seen so far.

    Args:
        points: every row of every curve, oldest first.
        direction: of the watched metric; losses in `points` are negated where it is `maximise`.
        actions: the action that led to each segment ("warmup" for the first), where known.
        horizon: FLOPs that the step decided on would spend: the rest of the segment (inside training) or the next
            segment (between rounds). None: as much as the last segment.
        reselect_flops: what scoring and selecting once cost, where known.
        remix_flops: what mixing and selecting once cost, where known.
        reallocation: a new plan that pays or is owed; None where none does.
        drift: what has moved under the latest selection; None where nothing tells.
        retention: what may not be forgotten; None where no loss on a retention set was seen.
    """

    points: tuple[Point, ...]
    direction: Direction = "minimise"
    actions: tuple[str, ...] = ()
    horizon: int | None = None
    reselect_flops: int | None = None
    remix_flops: int | None = None
    reallocation: Reallocation | None = None
    drift: Drift | None = None
    retention: Retention | None = None

    @classmethod
    def from_curves(
        cls,
        curves: Iterable[pa.Table],
        *,
        metric: str = "validation_loss",
        direction: Direction = "minimise",
        actions: Sequence[str] = (),
        horizon: int | None = None,
        reselect_flops: int | None = None,
        most_forgotten: float | None = None,
    ) -> State:
        """Build the state from `curve` tables, oldest first; each table's FLOPs and tokens start at zero."""
        return cls.from_rows(
            [table.to_pylist() for table in curves],
            metric=metric,
            direction=direction,
            actions=actions,
            horizon=horizon,
            reselect_flops=reselect_flops,
            most_forgotten=most_forgotten,
        )

    @classmethod
    def from_rows(
        cls,
        segments: Iterable[Sequence[Mapping[str, Any]]],
        *,
        metric: str = "validation_loss",
        direction: Direction = "minimise",
        actions: Sequence[str] = (),
        horizon: int | None = None,
        reselect_flops: int | None = None,
        most_forgotten: float | None = None,
        retention: Retention | None = None,
    ) -> State:
        """Build the state from rows of curve columns, one sequence a segment.

        Only `step` and `metric` are required; a row without `flops` counts its step as its FLOPs, so that a plain file
        of evaluations can be judged too. The standard error is read from `validation_se` for the validation loss.
        Where `retention` is not given, the first row with a `retention_loss` is where it began, and `most_forgotten`
        nats above that are allowed.
        """
        points: list[Point] = []
        flops = tokens = 0
        se_name = "validation_se" if metric == "validation_loss" else f"{metric}_se"
        sign = 1.0 if direction == "minimise" else -1.0
        for segment, rows in enumerate(segments):
            for row in rows:
                value = row.get(metric)
                points.append(
                    Point(
                        step=int(row["step"]),
                        flops=flops + int(row.get("flops", row["step"])),
                        tokens=tokens + int(row.get("tokens", 0)),
                        loss=None if value is None else sign * float(value),
                        se=row.get(se_name),
                        phase=str(row.get("phase", "stable")),
                        segment=segment,
                        train_loss=row.get("train_loss"),
                        retention=row.get("retention_loss"),
                        retention_se=row.get("retention_se"),
                        retention_rise_se=row.get("retention_rise_se"),
                    )
                )
            if points:
                flops, tokens = points[-1].flops, points[-1].tokens
        began = next((point for point in points if point.retention is not None), None)
        if retention is None and began is not None:
            retention = Retention(float(began.retention or 0.0), began.retention_se, most_forgotten)
        return cls(tuple(points), direction, tuple(actions), horizon, reselect_flops, retention=retention)

    @property
    def evaluations(self) -> tuple[Point, ...]:
        """Evaluations with a finite loss, oldest first."""
        return tuple(point for point in self.points if point.finite)

    @property
    def attempts(self) -> tuple[Point, ...]:
        """Every evaluation, finite or not, oldest first."""
        return tuple(point for point in self.points if point.loss is not None)

    @property
    def non_finite_steps(self) -> tuple[int, ...]:
        """Steps at which a loss (of training or validation) was not finite."""
        return tuple(point.step for point in self.points if point.broken)

    @property
    def best(self) -> Point | None:
        """The first evaluation with the lowest finite loss among those that have not forgotten more than is allowed;
        None where there is none."""
        kept = (point for point in self.evaluations if not self.forgot(point))
        return min(kept, key=lambda point: point.loss or 0.0, default=None)

    @property
    def retained(self) -> Point | None:
        """The latest evaluation of the retention set; None where there is none."""
        return next((point for point in reversed(self.points) if point.retention is not None), None)

    def rise(self, point: Point) -> tuple[float, float] | None:
        """Return (nats, standard error) by which the retention loss at `point` lies above where it began; None where it
        is not known. Without the error of the paired difference, that of two independent evaluations."""
        if self.retention is None or point.retention is None:
            return None
        error = point.retention_rise_se
        if error is None:
            error = math.hypot(point.retention_se or 0.0, self.retention.se or 0.0)
        return point.retention - self.retention.loss, error

    def forgot(self, point: Point) -> bool:
        """Return whether more than is allowed is forgotten at `point`, beyond error; see `forgotten`."""
        rise = self.rise(point)
        return rise is not None and self.retention is not None and forgotten(*rise, self.retention.allowed)

    @property
    def last_segment(self) -> int:
        """Index of the latest segment; -1 for an empty state."""
        return self.points[-1].segment if self.points else -1

    @property
    def annealed(self) -> bool:
        """Whether the latest segment has reached its decay phase."""
        return bool(self.points) and self.points[-1].phase == "decay"

    @property
    def flops(self) -> int:
        """FLOPs spent in training so far."""
        return self.points[-1].flops if self.points else 0

    def segment(self, index: int) -> tuple[Point, ...]:
        """Return the finite evaluations of one segment."""
        return tuple(point for point in self.evaluations if point.segment == index)

    def segment_flops(self, index: int) -> int:
        """Return the FLOPs that one segment spent."""
        own = [point.flops for point in self.points if point.segment == index]
        before = [point.flops for point in self.points if point.segment < index]
        return own[-1] - (before[-1] if before else 0) if own else 0

    def start(self, index: int) -> Point | None:
        """Return the evaluation that segment `index` started from: the end of the one before it, or its best where the
        end is `outdone` by that."""
        before = self.segment(index - 1)
        if not before:
            return None
        best, end = min(before, key=lambda point: point.loss or 0.0), before[-1]
        return best if outdone(end.loss or 0.0, end.se, best.loss or 0.0, best.se) else end

    def segment_gain(self, index: int) -> float | None:
        """Return how far a segment lowered the loss: that of its start minus the lowest inside it, nats.

        Without a segment before it, its own first evaluation is the start. None where nothing can be compared.
        """
        inside = self.segment(index)
        start = self.start(index) or (inside[0] if len(inside) > 1 else None)
        if start is None or not inside:
            return None
        return float(start.loss or 0.0) - min(float(point.loss or 0.0) for point in inside)

    def shown(self, loss: float | None) -> float | None:
        """Return a loss of this state in the metric's own sense (undoing the sign of `maximise`)."""
        return loss if loss is None or self.direction == "minimise" else -loss
