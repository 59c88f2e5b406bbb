"""Has the candidate been trained on what it is evaluated on?

Counts the holdout items that a selected training row meets. By default none may be met whole or by its prompt, and at
most one in a hundred by long n-grams. Nothing compared is no pass. What a meeting is stands in `text/overlap.py`.
"""

from __future__ import annotations

from pydantic import Field

from data_contracts.records import Finding
from stages.judge.evidence import Evidence
from stages.judge.gate import Gate


class Contamination(Gate):
    """Pass where the shares of holdout items that were met stay within their limits."""

    most_whole: float = Field(0.0, ge=0, le=1, description="Share of items met whole (exact, or but for spelling).")
    most_prompts: float = Field(0.0, ge=0, le=1, description="Share of items whose prompt was met with another answer.")
    most_ngrams: float = Field(0.01, ge=0, le=1, description="Share of items met by n-grams only.")

    def judge(self, evidence: Evidence) -> Finding:
        """Count the items met, each once, by its strongest kind."""
        items, rows = evidence.holdout_items, evidence.training_rows
        if not items or not rows:
            reason = f"nothing was compared: {items} holdout item(s), {rows} training row(s)"
            return self.found(False, reason, {"items": items, "rows": rows})
        strength = {"exact": 0, "normalised": 0, "prompt": 1, "ngram": 2}
        kinds: dict[str, int] = {}
        for meeting in evidence.meetings:
            kinds[meeting.item_id] = min(strength[meeting.kind], kinds.get(meeting.item_id, 2))
        counts = [list(kinds.values()).count(kind) for kind in range(3)]
        limits = (self.most_whole, self.most_prompts, self.most_ngrams)
        passed = all(count <= limit * items for count, limit in zip(counts, limits, strict=True))
        reason = (
            f"of {items} holdout items {counts[0]} stand in the training rows, {counts[1]} by their prompt, "
            f"{counts[2]} by long n-grams"
        )
        numbers = {"items": items, "rows": rows, "whole": counts[0], "prompts": counts[1], "ngrams": counts[2]}
        return self.found(passed, reason, dict(numbers))
