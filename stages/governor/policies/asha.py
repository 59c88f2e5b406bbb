"""Stop at a rung unless the loss there is among the best of earlier runs: the stopping rule of ASHA, on one run.

Rungs lie at `grace_flops`·η^k. At each rung that the run has reached, its first evaluation there or beyond is compared
with the first ones of `curves`; it goes on where it is not worse than their best 1/η. Against too few records nothing
is stopped. Source: Li et al. 2020, "A system for massively parallel hyperparameter tuning" (arXiv 1810.05934), in the
stopping form of Ray Tune's ASHAScheduler; time is FLOPs.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from data_contracts.cost import Budget
from stages.governor.policy import Choice, Number, Policy, closing, evidence, obliged, onward
from stages.governor.records import RecordedCurve
from stages.governor.state import State


class Asha(Policy):
    """End once a rung is reached with a loss outside the best 1/η of the records there."""

    curves: tuple[RecordedCurve, ...] = Field((), description="Earlier runs, the metric along FLOPs.")
    grace_flops: int = Field(ge=1, description="FLOPs of the first rung: nothing is stopped before it.")
    reduction: float = Field(1.5, gt=1, description="η: ratio between rungs, and 1/η of the runs go on.")
    least_records: int = Field(1, ge=1, description="Records that a rung needs before it stops a run.")
    once: bool = Field(
        False, description="Judge a rung only at the evaluation that reaches it: where `curves` grow meanwhile."
    )

    def decide(self, state: State, remaining: Budget, allowed: frozenset[str]) -> Choice:
        """Return one of `allowed`: the end where the latest rung reached was not passed, else going on."""
        numbers: dict[str, Number] = {
            **evidence(state),
            "policy_grace_flops": self.grace_flops,
            "policy_reduction": self.reduction,
            "policy_curves": len(self.curves),
        }
        forced = obliged(state, remaining, allowed)
        if forced:
            return Choice(action=forced[0], reason=forced[1], numbers=numbers)
        rung = float(self.grace_flops)
        action, reason = onward(allowed), f"the first rung lies at {rung:.4g} FLOPs"
        while rung <= state.flops:
            reached = next((point for point in state.evaluations if point.flops >= rung), None)
            seen = [value for curve in self.curves if (value := curve.at(int(np.ceil(rung)))) is not None]
            if self.once and reached is not state.evaluations[-1]:
                reached = None  # it was judged when it was reached
            if reached is not None and len(seen) >= self.least_records:
                lower = np.array(seen) * (1.0 if state.direction == "minimise" else -1.0)
                cutoff = float(np.percentile(lower, 100 / self.reduction))
                numbers |= {"rung_flops": int(rung), "rung_cutoff": state.shown(cutoff), "rung_records": len(seen)}
                numbers |= {"rung_value": state.shown(reached.loss)}
                reason = f"among the best 1/{self.reduction:g} of {len(seen)} record(s) at {rung:.4g} FLOPs"
                if float(reached.loss or 0.0) > cutoff:
                    return Choice(action=closing(allowed), reason=f"not {reason}", numbers=numbers)
            rung *= self.reduction
        return Choice(action=action, reason=reason, numbers=numbers)
