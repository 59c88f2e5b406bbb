"""The model card: what was decided, on what evidence, from what, and what it cost. Markdown with a YAML head.

The head keeps to the fields of the Hugging Face hub; nothing is claimed that was not measured (no licence, no language,
no intended use). Every digest needed to find each part again stands in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import yaml

from data_contracts.ledger import Ledger
from data_contracts.records import ModelPin, Plan, Ref, Verdict

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class CardFacts:
    """What a card is made from."""

    name: str
    verdict: Verdict
    candidate: Ref | None
    base: ModelPin
    evaluation: Ref
    plan: Plan | None
    ledger: Ledger
    decision_digest: str


def card_of(facts: CardFacts) -> str:
    """Return the model card."""
    verdict = facts.verdict
    numbers = [(n, v) for n, v in verdict.numbers.items() if not n.endswith("_digest") and v is not None]
    gates = [(f.gate, "passed" if f.passed else "failed", f.reason) for f in verdict.findings]
    costs = [
        (stage, f"{cost.flops:.4g}", cost.tokens, f"{cost.seconds:.1f}", f"{cost.peak_bytes / 2**20:.0f} MiB")
        for stage, cost in sorted(facts.ledger.by_stage().items())
    ]
    parts = [
        _head(facts),
        f"# {facts.name}",
        f"**{verdict.outcome}**: {_flat(verdict.reason)}",
        "## Evidence",
        "Losses are nats an answer token over the holdout, which nothing was trained or selected on.",
        _table(("number", "value"), numbers),
        _table(("gate", "", "finding"), gates),
        "## Where it comes from",
        _table(("part", "what", "digest"), _lineage(facts)),
        "## What it cost",
        _table(("stage", "FLOPs", "tokens", "seconds", "peak memory"), costs),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(facts: CardFacts) -> str:
    head: dict[str, object] = {"library_name": "transformers", "tags": ["lazytrain"]}
    if facts.base.locator.startswith("hub:"):
        head["base_model"] = facts.base.source
    return f"---\n{yaml.safe_dump(head, sort_keys=True)}---"


def _lineage(facts: CardFacts) -> list[tuple[Cell, ...]]:
    verdict = facts.verdict
    rows: list[tuple[Cell, ...]] = [
        ("base model", facts.base.source, facts.base.digest),
        ("tokenizer", facts.base.source, facts.base.tokenizer_digest),
    ]
    if facts.candidate is not None:
        rows.append(("checkpoint", f"{facts.candidate.run}/{facts.candidate.path}", facts.candidate.digest))
    if verdict.champion is not None:
        rows.append(("champion compared with", "checkpoint", verdict.champion))
    rows.append(("evaluation", f"{facts.evaluation.run}/{facts.evaluation.path}", facts.evaluation.digest))
    rows += [
        (name.removesuffix("_digest").replace("_", " "), "rows trained on", str(value))
        for name, value in verdict.numbers.items()
        if name.startswith("selection_") and name.endswith("_digest")
    ]
    if facts.plan is not None:
        rows.append(("technique", str(facts.plan.technique.get("method")), ""))
    rows.append(("decision", "canonical JSON of the verdict", facts.decision_digest))
    return rows


def _table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    lines = ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns), *lines])


def _cell(value: Cell) -> str:
    return _flat(f"{value:.6g}" if isinstance(value, float) else str(value)).replace("|", "\\|")


def _flat(text: str) -> str:
    return " ".join(text.split())
