"""What earlier segments of training held past their plans' predictions, and what a new plan makes of it.

A segment leaves the record `MemoryUse` beside its curve. Where one held more than was allowed, or memory ran out, the
prediction was too low on this device: the next plan allows so much less, and a way whose like ran out is not chosen
again. Segments that kept within what was allowed change nothing, so that plans stay what their inputs say. It is learnt
from this run's segments and from those that the newest plan of the same model and kind of device in the store knew of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_contracts.records import Plan
from stages.governor.reallocation import uses_of
from stages.stage import Artifact, Inputs


@dataclass(frozen=True)
class Residual:
    """What was learnt.

    Attributes:
        bytes: held past a prediction, at most, where what was allowed was broken; 0 where it never was.
        below: predicted bytes of the smallest way that memory ran out in; None where it never did.
        past: most held past a prediction in any segment, less than 0 where all held fewer; None without segments.
    """

    bytes: int = 0
    below: int | None = None
    past: int | None = None

    def of(self, limit: int | None, headroom: float) -> int:
        """Return how many bytes less than `limit` less `headroom` a plan may take."""
        allowed = None if limit is None else int(limit * (1 - headroom))
        if allowed is None or self.below is None:
            return self.bytes
        return max(self.bytes, allowed - self.below + 1)


def learnt(curves: Sequence[Artifact], earlier: Inputs | None, device: str) -> Residual:
    """Return the residual of segments on `device`: of this run, and of an earlier plan's segments and what it knew."""
    known, before, below = list(curves), 0, list[int]()
    if earlier is not None:
        known += earlier.all("curve")
        found = earlier.maybe("plan")
        if found is not None:
            plan = found.record(Plan)
            below = [] if plan.ran_out_bytes is None else [plan.ran_out_bytes]
            if plan.allowed_bytes is None or plan.allowed_bytes + 1 not in below:  # else it was of that plan's budget
                before = plan.residual_bytes
    uses = [use for use in uses_of(known) if use.device == device]
    broken = [use for use in uses if use.broke]
    return Residual(
        bytes=max([before, *(use.past for use in broken)]),
        below=min([*below, *(use.predicted_bytes for use in broken if use.ran_out)], default=None),
        past=max((use.past for use in uses), default=None),
    )
