"""The effect itself: what the verdict allows, done once, under a check, and written down.

The decision digest is the sha256 of the verdict's canonical JSON. A held or rejected verdict touches no registry. The
model card is written for every outcome, beside the record, and goes into the registry with a promoted version.
"""

from __future__ import annotations

from data_contracts.canonical import digest_of
from data_contracts.config import PromoteConfig
from data_contracts.errors import ArtifactError
from data_contracts.records import Plan, Promotion, Summary, Verdict
from stages.model.pin import read_pin
from stages.promote.card import CardFacts, card_of
from stages.stage import Artifact, Inputs, Registry, Work

NOT_MOVED = {"hold": "held", "reject": "rejected"}


def promote(config: PromoteConfig, inputs: Inputs, work: Work) -> Summary:
    """Carry the verdict out and write `promotion`. Raises `ArtifactError` for inputs that do not belong together."""
    verdict = inputs.one("verdict").record(Verdict)
    candidate, evaluation, plan = inputs.maybe("candidate"), inputs.one("evaluation"), inputs.maybe("plan")
    _belong_together(verdict, candidate, evaluation)
    facts = CardFacts(
        name=config.registered_model,
        verdict=verdict,
        candidate=candidate.ref if candidate else None,
        base=read_pin(inputs.one("base")),
        evaluation=evaluation.ref,
        plan=plan.record(Plan) if plan else None,
        ledger=work.spent(),
        decision_digest=digest_of(verdict.model_dump(mode="json")),
    )
    card = card_of(facts)
    work.measured("promotion", "card.md").write_text(card, encoding="utf-8")
    if verdict.outcome == "promote" and candidate is not None:
        promotion = _move(config, facts, candidate, card, work.registry())
    else:
        promotion = _record(config, facts, NOT_MOVED[verdict.outcome], f"nothing was moved: {verdict.reason}")
    work.record("promotion", promotion)
    return Summary(
        title=f"promote: {promotion.outcome}",
        facts={
            "outcome": promotion.outcome,
            "reason": promotion.reason,
            "model": f"{promotion.registered_model}@{promotion.alias}",
            "version": promotion.version,
            "previous version": promotion.previous_version,
            "decision digest": promotion.decision_digest,
        },
    )


def _move(config: PromoteConfig, facts: CardFacts, candidate: Artifact, card: str, registry: Registry) -> Promotion:
    model, alias = config.registered_model, config.alias
    before = registry.current(model, alias)
    if before is not None and before.checkpoint.digest == candidate.ref.digest:
        return _record(config, facts, "promoted", f"{model}@{alias} already names this checkpoint", before.version)
    saw = facts.verdict.champion
    if (before.checkpoint.digest if before else None) != saw:
        found = f"version {before.version}" if before else "nothing"
        reason = f"nothing was moved: {model}@{alias} names {found} now, and that is not what the verdict compared with"
        return _record(config, facts, "held", reason, previous=before.version if before else None)
    tags = {
        "outcome": facts.verdict.outcome,
        "decision_digest": facts.decision_digest,
        "base_digest": facts.base.digest,
        "evaluation_digest": facts.evaluation.digest,
        **{name: str(value) for name, value in facts.verdict.numbers.items() if value is not None},
    }
    version = registry.promote(model, alias, candidate, card, tags, saw)
    previous = before.version if before else None
    return _record(config, facts, "promoted", facts.verdict.reason, version.version, previous)


def _record(
    config: PromoteConfig,
    facts: CardFacts,
    outcome: str,
    reason: str,
    version: int | None = None,
    previous: int | None = None,
) -> Promotion:
    return Promotion(
        outcome=outcome,
        reason=reason,
        registered_model=config.registered_model,
        alias=config.alias,
        version=version,
        previous_version=previous,
        decision_digest=facts.decision_digest,
    )


def _belong_together(verdict: Verdict, candidate: Artifact | None, evaluation: Artifact) -> None:
    """Raise `ArtifactError` where the verdict is about another candidate or another evaluation."""
    judged, given = verdict.candidate, candidate.ref.digest if candidate else None
    if judged != given:
        raise ArtifactError(
            "the candidate is the one that the verdict judged",
            f"the verdict judged {judged or 'none'}, given is {given or 'none'}",
            "judge this candidate first",
        )
    seen = verdict.numbers.get("evaluation_digest")
    if seen is not None and seen != evaluation.ref.digest:
        raise ArtifactError(
            "the evaluation is the one that the verdict was made from",
            f"the verdict saw {seen}, given is {evaluation.ref.digest}",
            "judge this evaluation first",
        )
