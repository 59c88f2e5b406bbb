"""The engine of judging: gathers the evidence, asks the gates, writes verdict and contamination.

What is compared and how stands in `evidence.py` and the gates; what follows from it in `verdict.py`.
"""

from __future__ import annotations

from data_contracts.config import JudgeConfig
from data_contracts.method import resolve
from data_contracts.records import Summary, Table, Verdict
from stages.judge.contamination import meetings_of, selected_ids
from stages.judge.evidence import Evidence
from stages.judge.gate import Gate
from stages.judge.verdict import verdict_of
from stages.stage import Inputs, Work

COLUMNS = ("item_id", "example_id", "kind", "overlap", "detail")


def judge(config: JudgeConfig, inputs: Inputs, work: Work) -> Summary:
    """Write `verdict` and `contamination` and return the summary."""
    gates = [resolve(Gate, settings, f"judge.gates[{i}]") for i, settings in enumerate(config.gates)]
    evaluation, candidate, champion = inputs.one("evaluation"), inputs.maybe("candidate"), inputs.maybe("champion")
    selections = inputs.all("selection")
    trained = [inputs.one("pool"), *inputs.all("target")]
    meetings, items, rows = meetings_of(inputs.one("holdout"), trained, selected_ids(selections))
    work.table("contamination", {name: [getattr(meeting, name) for meeting in meetings] for name in COLUMNS})
    evidence = Evidence(evaluation.table(), meetings, items, rows, champion is not None)
    lineage = {"evaluation_digest": evaluation.ref.digest} | {
        f"selection_{i}_digest": selection.ref.digest for i, selection in enumerate(selections)
    }
    verdict = verdict_of(
        gates,
        evidence,
        candidate=candidate.ref.digest if candidate else None,
        champion=champion.ref.digest if champion else None,
        lineage=lineage,
    )
    work.record("verdict", verdict)
    return _summary(verdict, len(meetings))


def _summary(verdict: Verdict, meetings: int) -> Summary:
    rows = tuple((f.gate, "passed" if f.passed else "failed", f.reason) for f in verdict.findings)
    shown = {name: value for name, value in verdict.numbers.items() if not name.endswith("_digest")}
    return Summary(
        title=f"verdict: {verdict.outcome}",
        facts={"outcome": verdict.outcome, "reason": verdict.reason, **shown, "contamination rows": meetings},
        tables=(Table(title="Gates", columns=("gate", "", "finding"), rows=rows),),
    )
