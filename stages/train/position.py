"""Where a segment stands: all of its state besides tensors and rows, as plain data for snapshots and the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data_contracts.cost import Cost
from stages.governor.state import outdone
from stages.technique.noise import NoiseScale
from stages.train.retention import Retained
from stages.train.validate import Loss


@dataclass
class Position:
    """Counters of one segment.

    Attributes:
        steps: planned steps; fewer once the policy ends the segment or begins its decay.
        schedule, noise: states of the schedule and of the noise scale.
        step: steps made.
        tokens, flops: of training; eval_tokens, eval_flops: of evaluations; score_tokens, score_flops: of influence.
        select_flops, select_tokens: of the batch selector's looks at candidates.
        direction_step: step of the run whose weights made the direction of influence; None before there is one.
        evaluated: evaluations made.
        micro_batch: rows a forward and backward pass, where memory made it fewer than planned.
        halved: steps of the run, the micro-batch halved before each.
        skipped: steps of the run that were not finite and so not applied.
        guard: the guard's state; empty where there is none.
        withheld: steps of the run that were finite and that the guard did not apply.
        returned: (step of the run, step whose state was put back after it).
        lost: steps that the weights do not have behind them, because an earlier state was put back.
        slowest: least factor that the guard put on the learning rate.
        best: the evaluation with the lowest finite loss, as `stated`, among those that have not forgotten more than is
            allowed; where all have, the one that has forgotten least.
        end: the last evaluation, where it is another and training goes on from there; else None.
        before: the evaluation that the segment started from, where known.
        ended: why the policy changed the segment; "" where it did not.
    """

    steps: int
    schedule: dict[str, Any]
    noise: dict[str, float] = field(default_factory=lambda: NoiseScale().state())
    step: int = 0
    tokens: int = 0
    flops: int = 0
    eval_flops: int = 0
    eval_tokens: int = 0
    score_flops: int = 0
    score_tokens: int = 0
    select_flops: int = 0
    select_tokens: int = 0
    direction_step: int | None = None
    evaluated: int = 0
    micro_batch: int | None = None
    halved: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    guard: dict[str, Any] = field(default_factory=dict)
    withheld: list[int] = field(default_factory=list)
    returned: list[list[int]] = field(default_factory=list)
    lost: int = 0
    slowest: float = 1.0
    best: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    before: dict[str, Any] | None = None
    ended: str = ""

    @property
    def spent(self) -> Cost:
        """What the segment has spent so far, counted."""
        flops = self.flops + self.eval_flops + self.score_flops + self.select_flops
        return Cost(flops=flops, tokens=self.tokens + self.eval_tokens + self.score_tokens + self.select_tokens)

    def improves(self, loss: Loss) -> bool:
        """Return whether `loss` is finite and better than the best so far; a loss that is not finite never is."""
        return loss.finite and (self.best is None or _order(stated(0, loss)) < _order(self.best))

    def goes_on(self, loss: Loss) -> bool:
        """Return whether training may go on from this last evaluation, which is not the best, rather than from that."""
        best = self.best
        if not loss.finite or best is None or loss.mean == best["loss"] or stated(0, loss).get("forgot"):
            return False
        return not outdone(loss.mean, loss.se, best["loss"], best["se"])


def stated(step: int, loss: Loss) -> dict[str, Any]:
    """Return an evaluation as plain data: step, loss, se, and what it says of the retention set where there is one."""
    return {"step": step, "loss": loss.mean, "se": loss.se, **retention_columns(loss.retained), **_forgot(loss)}


def retention_columns(retained: Retained | None) -> dict[str, float | None]:
    """Return the curve's columns of an evaluation of the retention set; none where there is no such set."""
    if retained is None:
        return {}
    loss = retained.loss
    return {"retention_loss": loss.mean, "retention_se": loss.se, "retention_rise_se": retained.rise_se}


def _forgot(loss: Loss) -> dict[str, bool]:
    return {} if loss.retained is None else {"forgot": loss.retained.forgot}


def _order(evaluation: Mapping[str, Any]) -> tuple[bool, float, float]:
    """Return what a better evaluation has less of: one that forgot too much comes after all others."""
    if not evaluation.get("forgot"):
        return False, 0.0, evaluation["loss"]
    retention = evaluation["retention_loss"]
    return True, retention if math.isfinite(retention) else math.inf, evaluation["loss"]
