"""Is the candidate better than the model that is in use now?

Without a champion there is nothing to beat: the gate passes and says so. A champion that was not, or could not be,
evaluated is missing evidence, and fails. See `PairedGate` for the statistics.
"""

from __future__ import annotations

from data_contracts.records import Finding
from stages.judge.evidence import Evidence
from stages.judge.gate import PairedGate


class BetterThanChampion(PairedGate):
    """Pass where the interval of candidate − champion excludes zero on the better side, or there is no champion."""

    def judge(self, evidence: Evidence) -> Finding:
        """Compare candidate and champion."""
        if not evidence.champion:
            return self.found(True, "no champion yet")
        return self.compare(evidence, "champion")
