"""Is the candidate better than the base model that it was trained from?

A model that training did not improve is not worth promoting, whatever its absolute numbers. See `PairedGate` for the
statistics.
"""

from __future__ import annotations

from data_contracts.records import Finding
from stages.judge.evidence import Evidence
from stages.judge.gate import PairedGate


class BetterThanBase(PairedGate):
    """Pass where the interval of candidate − base excludes zero on the better side."""

    def judge(self, evidence: Evidence) -> Finding:
        """Compare candidate and base."""
        return self.compare(evidence, "base")
