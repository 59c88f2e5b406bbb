"""Where a run begins whose data changed since the run before it, and what it says of the change.

The run before is the newest of the same name on other data, whatever came of it: running again, or resuming, asks the
same and is answered by the same commits. What it left is gone on from only where that is sound: the same base, the same
way of training, and every row that the weights have seen still among those that may be trained on, so that none of them
is on a side that judges. Everything gone on from is an input of what follows it, never a hidden state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.errors import ArtifactError
from data_contracts.ledger import START
from data_contracts.records import CHECKPOINT, Decision, Plan, Ref, Result
from data_contracts.store import AttemptRow, Store
from flows.pipeline_run import PipelineRun
from stages.admission import parse_slice
from stages.governor.drift import shared_rows
from stages.identity import stage_version
from stages.stage import find_stage

DATA = ("base", "pool_tokens", "target_tokens", "validation_tokens", "holdout_tokens", "retention_tokens")
"""What makes a run's data, of the outputs of ingest."""
WAY = ("technique", "precision", "micro_batch", "accumulation", "packed")
"""What of a plan decides the steps of a warm-up."""
LOOKED_AT = 20
"""Runs of the store that are looked through, newest first."""


@dataclass(frozen=True)
class Start:
    """What a run goes on from; empty where it begins anew.

    Attributes:
        begun: an earlier run's warm-up that stands in for this one's.
        checkpoint: what this run's warm-up starts from.
        target: the tokens of the target that the latest selection was made for, where this one is another.
        scores: the latest scoring.
        selections: all that `checkpoint` has been trained on.
    """

    begun: Result | None = None
    checkpoint: tuple[Ref, ...] = ()
    target: tuple[Ref, ...] = ()
    scores: tuple[Ref, ...] = ()
    selections: tuple[Ref, ...] = ()


def start_of(run: PipelineRun, data: Result, planned: Result) -> Start:
    """Return where a run begins, as `begin.start` asks and as far as it is sound; the user is told."""
    before = _before(run, data)
    if before is None:
        return Start()
    name, rows = before
    changed = rows["ingest"].refs["target_tokens"].digest != data.refs["target_tokens"].digest
    if changed:
        tables = (_table(run.store, refs["target_tokens"]) for refs in (data.refs, rows["ingest"].refs))
        run.notice(
            f"the target is another than that of run {name[:12]}: {shared_rows(*tables):.0%} of its rows are the same"
        )
    how = run.config.begin.start
    if how == "anew":
        return Start()
    try:
        found = _warm_up(run, data, planned, rows) if how == "warm_up" else _latest(run, data, planned, rows, changed)
    except ArtifactError as error:  # removed meanwhile, or of another version of the project
        found = error.found
    if isinstance(found, str):
        run.notice(f"this run begins anew, not where run {name[:12]} did: {found}")
        return Start()
    if found.checkpoint:
        flops = run.store.ledger(found.checkpoint).total.flops
        run.notice(f"this run goes on from run {name[:12]}, whose {flops:.3g} FLOPs its own budget does not pay")
    return found


def trained_on(store: Store, checkpoint: Ref) -> tuple[Ref, ...]:
    """Return every selection that a checkpoint's weights were trained on, the latest first."""
    found, waiting = list[Ref](), [checkpoint]
    while waiting:
        manifest = store.read_manifest(waiting.pop().run)
        own = manifest.outputs.get("selection")
        found += manifest.inputs.get("selection", (own.ref,) if own else ())
        waiting += manifest.inputs.get("checkpoint", ()) + manifest.inputs.get(START, ())
    return tuple(dict.fromkeys(found))


def compared(store: Store, before: tuple[Ref, ...], now: tuple[Ref, ...]) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
    """Return two scorings by which a decision tells whether the ranking has moved, the earlier one first.

    Empty where the pool was not scored again, or by another scorer.
    """
    if not before or not now or before == now:
        return (), ()
    then, anew = (store.read_manifest(refs[-1].run).config["score"] for refs in (before, now))
    same = all(then[part] == anew[part] for part in ("scorer", "groups", "combine"))
    return (before[-1:], now[-1:]) if same else ((), ())


Rows = dict[str, AttemptRow]


def _before(run: PipelineRun, data: Result) -> tuple[str, Rows] | None:
    """Return the newest run of this name on other data that warmed up, and what it did, by the name of the call."""
    for past in run.store.runs()[:LOOKED_AT]:
        if past.name != run.config.name or past.run == run.run:
            continue
        rows = {row.name: row for row in run.store.attempts(past.run) if row.refs}
        if {"ingest", "plan", "begin"} <= set(rows):
            refs = rows["ingest"].refs
            if any(_digest(refs, name) != _digest(data.refs, name) for name in DATA):
                return past.run, rows
    return None


def _warm_up(run: PipelineRun, data: Result, planned: Result, rows: Rows) -> Start | str:
    """Return the earlier warm-up, or why it does not stand."""
    manifest = run.store.read_manifest(rows["begin"].run)
    stage, wanted = find_stage("begin"), run.config.slice("begin")
    config = parse_slice(stage, wanted)
    root = run.workspace.root
    given = {name: refs[0].digest for name, refs in manifest.inputs.items() if refs}
    if START in given:
        return "its warm-up went on from a run before it"
    if any(given.get(name) != _digest(data.refs, name) for name in ("base", "validation_tokens", "retention_tokens")):
        return "the base, the validation or the retention split is another"
    same = stage.external(parse_slice(stage, manifest.config), root) == stage.external(config, root)
    if not same or manifest.stage_version != stage_version(stage, config).digest:
        return "the warm-up's settings, or the project, are others"
    if not _same_way(run, planned, manifest.inputs["plan"][0], WAY):
        return "the plan is another"
    if not _allowed(run.store, data, [rows["begin"].refs["selection"]]):
        return "a row of its warm-up is no longer in the pool"
    row = rows["begin"]
    result = Result(stage="begin", identity=row.identity, run=row.run, cached=True, refs=row.refs, costs=row.costs)
    return Start(begun=run.adopted("begin", result))


def _latest(run: PipelineRun, data: Result, planned: Result, rows: Rows, changed: bool) -> Start | str:
    """Return the best that the earlier run trained, or why it cannot be gone on from."""
    if rows["ingest"].refs["base"].digest != data.refs["base"].digest:
        return "the base is another"
    decided = [row.refs["decision"] for row in rows.values() if "decision" in row.refs]
    best = run.store.record(decided[-1], Decision).best if decided else None
    refs = [row.refs["checkpoint"] for row in rows.values() if "checkpoint" in row.refs]
    checkpoint = next((ref for ref in refs if ref.digest == best), None)
    if checkpoint is None or checkpoint.contract != CHECKPOINT.id:
        return "it left no checkpoint that a decision called its best"
    plans = [row.refs["plan"] for row in rows.values() if "plan" in row.refs]
    if not _same_way(run, planned, plans[-1], ("technique",)):
        return "the plan trains by another technique"
    selections = trained_on(run.store, checkpoint)
    if not _allowed(run.store, data, selections):
        return "a row that it trained on is no longer in the pool"
    target = (rows["ingest"].refs["target_tokens"],) if changed else ()
    scores = [row.refs["scores"] for row in rows.values() if row.name.startswith("score-") and "scores" in row.refs]
    return Start(None, (checkpoint,), target, tuple(scores[-1:]), selections)


def _digest(refs: Mapping[str, Ref], name: str) -> str | None:
    return refs[name].digest if name in refs else None


def _same_way(run: PipelineRun, planned: Result, earlier: Ref, parts: Iterable[str]) -> bool:
    now, then = run.read(planned, "plan", Plan), run.store.record(earlier, Plan)
    return all(getattr(now, part) == getattr(then, part) for part in parts)


def _allowed(store: Store, data: Result, selections: Iterable[Ref]) -> bool:
    """Return whether every selected row may still be trained on."""
    sides = (_table(store, data.refs[name]).select(["example_id"]) for name in ("pool_tokens", "target_tokens"))
    there = pa.concat_tables(sides)
    return all(shared_rows(_table(store, ref), there) == 1.0 for ref in selections)


def _table(store: Store, ref: Ref) -> pa.Table:
    return read_table(store.open(ref) / TABLE_FILE)
