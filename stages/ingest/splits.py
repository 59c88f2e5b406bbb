"""The splits of a run, in the order in which they are kept apart: holdout, validation, retention, target, pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from data_contracts.config import DataConfig, IngestConfig, ModelConfig
from data_contracts.errors import ConfigError
from data_contracts.records import ModelPin, Summary, Table
from data_contracts.tables import RETENTION
from stages.ingest.cut import cut
from stages.ingest.engine import Ingest
from stages.ingest.tables import Totals, write_splits
from stages.model.load import load_tokenizer, pin_model
from stages.model.pin import write_pin
from stages.model.tokenise import Renderer
from stages.stage import Work

HELD = ("holdout", "validation")


def renderer_for(pin: Callable[[], ModelPin], settings: IngestConfig) -> Callable[[], Renderer]:
    """Return what makes the renderer of a pinned model when the first usable row needs it."""

    def make() -> Renderer:
        model = pin()
        return Renderer(
            load_tokenizer(model),
            supervise=settings.supervise,
            system_role=settings.system_role,
            vocabulary=model.grown_vocabulary or model.vocabulary,
        )

    return make


def ingest(data: DataConfig, model: ModelConfig, settings: IngestConfig, work: Work) -> Summary:
    """Write all outputs of the stage and return its summary.

    The model is pinned only when a usable row is met, so unusable data is told first. Raises `InputError` for missing
    files, a split without a usable row or a target too small to cut; `ConfigError`, `ModelError` from what it calls.
    """
    root = Path(str(work.knobs.get("root", ".")))
    pin = cache(lambda: pin_model(model, root, resize=settings.resize_embeddings))
    shares = {split: getattr(data, f"{split}_fraction") for split in HELD if not getattr(data, split)}
    if sum(shares.values()) >= 1:
        raise ConfigError(
            "the shares cut from the target leave some of it",
            f"they are {' + '.join(map(str, shares.values()))}",
            "lower data.validation_fraction or data.holdout_fraction",
        )
    engine = Ingest(settings, work, root, renderer_for(pin, settings), lambda: pin().longest)
    totals: Totals = {}
    for split in (*HELD, RETENTION):
        if getattr(data, split):
            spill, _ = engine.split(split, getattr(data, split))
            totals |= write_splits(work, spill, _outputs(split))
    spill, units = engine.split("target", data.target)
    what = "tasks" if settings.task_field else "questions"
    placed = cut(units, shares, work.seed("ingest", "cut"), what) if shares else None
    totals |= write_splits(work, spill, _outputs("target", *shares), placed)
    spill, _ = engine.split("pool", data.pool)
    totals |= write_splits(work, spill, _outputs("pool"))
    engine.close()
    write_pin(work, pin())
    return summary(engine, totals, dict.fromkeys(shares, "cut from the target"), work)


def _outputs(*splits: str) -> dict[str, tuple[str, str | None]]:
    return {split: (split, f"{split}_tokens") for split in splits}


def summary(engine: Ingest, totals: Totals, origins: Mapping[str, str], work: Work) -> Summary:
    """Return what was read, kept and refused, as tables whose numbers add up."""
    report = engine.report
    read = sum(count.read for count in report.files.values())
    kept = sum(count.kept for count in report.files.values())
    if report.repeated_ids:
        work.notice(
            f"ids repeat: {report.repeated_ids} rows share an id with an earlier one; rows are known by content"
        )
    if engine.limit < engine.settings.longest_tokens:
        work.notice(f"rows are at most {engine.limit} tokens: what the model was made for")
    if engine.renderer is not None and engine.renderer.control_rows:
        count, token = engine.renderer.control_rows, engine.renderer.control_token
        work.notice(f"{count} rows hold text that the tokenizer reads as a control token, such as {token!r}")
    broken = [name for (_, name), count in report.files.items() if count.reasons["corrupt"]]
    if broken:
        work.notice(f"could not be read to the end: {', '.join(broken[:5])}")
    columns = ("split", "rows", "tokens", "answer tokens", "truncated rows", "from")
    rows = [
        (
            split,
            total["rows"],
            total["tokens"],
            total["answer_tokens"],
            total["truncated"],
            origins.get(split, "its files"),
        )
        for split, total in totals.items()
    ]
    facts: dict[str, str | int | float | bool | None] = {
        "rows read": read,
        "rows kept": kept,
        "rows quarantined": read - kept,
    }
    facts |= {f"{split} rows": total["rows"] for split, total in totals.items()}
    tables = (Table(title="Splits", columns=columns, rows=tuple(rows)), *report.tables())
    return Summary(title=f"{kept} of {read} rows kept", facts=facts, tables=tables)
