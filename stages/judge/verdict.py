"""From the gates' findings to one verdict. Pure.

Promote when every gate passes; reject when one fails on what it saw; hold when the only failures are for want of
items. The numbers of the verdict always hold the comparison with the base, whichever gates are configured.
"""

from __future__ import annotations

from collections.abc import Sequence

from data_contracts.records import Finding, Verdict
from stages.judge.evidence import Evidence
from stages.judge.gate import Gate, Numbers
from stages.judge.gates.better_than_base import BetterThanBase


def verdict_of(
    gates: Sequence[Gate],
    evidence: Evidence,
    *,
    candidate: str | None,
    champion: str | None,
    lineage: dict[str, str] | None = None,
) -> Verdict:
    """Return the verdict of `gates` on `evidence`.

    Args:
        candidate, champion: digests of what was judged and of what it was compared with; without a candidate the
            verdict is reject.
        lineage: digests to keep with the numbers.
    """
    findings = tuple(gate.judge(evidence) for gate in gates)
    comparison = next((f for f, g in zip(findings, gates, strict=True) if _plain(g)), None) or BetterThanBase().judge(
        evidence
    )
    failed = [finding for finding in findings if not finding.passed]
    scarce = [finding for finding in failed if finding.numbers.get("scarce") is True]
    if candidate is None:
        outcome, reason = (
            "reject",
            "there is no candidate: no checkpoint has a finite validation loss and has kept what must not be forgotten",
        )
    elif not failed:
        outcome, reason = "promote", f"all {len(findings)} gates passed; {_plainly(comparison)}"
    elif len(scarce) == len(failed):
        outcome, reason = "hold", f"too little evidence: {_said(failed)}"
    else:
        outcome, reason = "reject", f"{_said(failed)}; {_plainly(comparison)}"
    return Verdict(
        outcome=outcome,
        reason=reason,
        candidate=candidate,
        champion=champion,
        findings=findings,
        numbers={**_compared(comparison), **(lineage or {})},
    )


def _plain(gate: Gate) -> bool:
    return isinstance(gate, BetterThanBase) and gate.suite == "perplexity" and gate.value == "loss"


def _compared(comparison: Finding) -> Numbers:
    names = {
        "before": "holdout_loss_before",
        "after": "holdout_loss_after",
        "difference": "difference",
        "low": "difference_low",
        "high": "difference_high",
        "confidence": "confidence",
        "items": "items",
        "clusters": "clusters",
    }
    return {ours: comparison.numbers.get(name) for name, ours in names.items()}


def _plainly(comparison: Finding) -> str:
    """Say whether the base was improved, in words that stand alone."""
    numbers = comparison.numbers
    if numbers.get("before") is None or numbers.get("after") is None:
        return f"whether the base model was improved is not known: {comparison.reason}"
    loss = (
        f"holdout loss {numbers['before']:.4g} → {numbers['after']:.4g}, {numbers['confidence']:.0%} interval of the "
        f"difference [{numbers['low']:.3g}, {numbers['high']:.3g}]"
        if numbers.get("low") is not None
        else f"holdout loss {numbers['before']:.4g} → {numbers['after']:.4g}"
    )
    return loss if comparison.passed else f"the base model was not improved: {loss}"


def _said(findings: Sequence[Finding]) -> str:
    return "; ".join(f"{finding.gate}: {finding.reason}" for finding in findings)
