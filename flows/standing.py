"""What stands of a run that another goes on with under a higher budget: its plans and decisions, up to what ended it.

Plans and decisions alone read the budget. Where those of the past run stand, every stage up to the closing decay is
adopted and its training goes on from the last checkpoint before the decay (the stable phase of warm-up/stable/decay
schedules); the decay and the stop are decided anew. One stands only for equal inputs and the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data_contracts.errors import ArtifactError, ConfigError
from data_contracts.records import Decision, Manifest, Ref, Result
from data_contracts.store import Store
from flows.workspace import Workspace
from stages.admission import parse_slice
from stages.identity import stage_version
from stages.stage import find_stage

RAISABLE: Mapping[str, tuple[str, ...]] = {
    "budget": ("flops", "tokens", "seconds", "money", "peak_bytes"),
    "govern": ("rounds",),
    "train": ("workers",),
}
"""What may be another when a run goes on: what decisions and plans alone read."""
READ_IT = ("plan", "govern")
"""Stages that read the budget."""
TRAINING = ("begin", "train")

Key = tuple[str, tuple[tuple[str, tuple[str, ...]], ...]]
Raised = Mapping[str, Mapping[str, Any]]


def check(raised: Raised, past: str | None) -> None:
    """Raise `ConfigError` for a setting that may not be another when run `past` goes on, or where none does."""
    if raised and past is None:
        raise ConfigError("limits are raised of a run that goes on", "no run is named", "name it as `resumes`")
    for section, part in raised.items():
        for name in part:
            if name not in RAISABLE.get(section, ()):
                known = ", ".join(f"{section}.{name}" for section, names in RAISABLE.items() for name in names)
                raise ConfigError(
                    f"a limit that a run may go on with: {known}",
                    f"it is {section}.{name}",
                    "change the configuration and start a new run: what is unchanged is reused",
                )


def key_of(verb: str, inputs: Mapping[str, Sequence[Ref]]) -> Key:
    """Return what a stage call is known by: its verb and what was given to it, by content."""
    given = ((name, tuple(ref.digest for ref in refs)) for name, refs in inputs.items() if refs)
    return verb, tuple(sorted(given))


def standing(store: Store, past: str, workspace: Workspace) -> dict[Key, Result]:
    """Return the plans and decisions of run `past` that stand under another budget, by what they were made from.

    Those made under the settings of `workspace` are left out: their commits are adopted as ever. A plan stands with a
    segment that was trained by it and stands too, so that what is decided anew is planned anew.
    """
    found: dict[Key, Result] = {}
    used = dict[str, list[Manifest]]()
    for row in store.attempts(past):
        if row.stage not in (*READ_IT, *TRAINING) or not row.refs:
            continue
        try:
            manifest = store.read_manifest(row.run)
            decision = store.record(row.refs["decision"], Decision) if row.stage == "govern" else None
        except ArtifactError:
            continue
        if row.stage in TRAINING:
            for ref in manifest.inputs.get("plan", ()):
                used.setdefault(ref.digest, []).append(manifest)
            continue
        settings, stage = workspace.config.slice(row.stage), find_stage(row.stage)
        if manifest.config == settings or (decision is not None and (decision.stops or decision.anneals)):
            continue
        if manifest.stage_version == stage_version(stage, parse_slice(stage, settings)).digest:
            found[key_of(row.stage, manifest.inputs)] = Result(
                stage=row.stage, identity=row.identity, run=row.run, cached=True, refs=row.refs, costs=row.costs
            )
    decisions = {result.refs["decision"].digest for result in found.values() if result.stage == "govern"}

    def kept(segment: Manifest) -> bool:
        return segment.stage == "begin" or any(ref.digest in decisions for ref in segment.inputs.get("decision", ()))

    return {
        key: result
        for key, result in found.items()
        if result.stage == "govern" or any(kept(segment) for segment in used.get(result.refs["plan"].digest, ()))
    }
