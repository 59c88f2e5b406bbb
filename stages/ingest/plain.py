"""Ingest of files without a run: one pool, perhaps no model; the same engine, the same contracts.

For `lazytrain ingest --pool …`: looks at data before there is a target or a model. With a model (a folder with no more
than a tokenizer will do) `pool_tokens` is written too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from data_contracts.config import IngestConfig, ModelConfig
from data_contracts.errors import ModelError
from data_contracts.records import Summary
from stages.ingest.engine import Ingest
from stages.ingest.splits import renderer_for, summary
from stages.ingest.tables import write_splits
from stages.model.load import pin_model
from stages.model.tokenise import Renderer
from stages.stage import Work

GIVES = {"pool": "examples", "pool_tokens": "tokens", "quarantine": "quarantine"}


def ingest_files(
    pool: Sequence[str], *, model: ModelConfig | None, settings: IngestConfig, work: Work, root: Path
) -> Summary:
    """Read a pool and write `pool`, and `pool_tokens` where there is a model; return the summary.

    Args:
        pool: files, folders or hub names.
        model: the model whose tokenizer is used; None: examples only.
        settings: how rows are read.
        work: where the outputs named in `GIVES` go.
        root: the folder that relative names start from.

    Raises as `splits.ingest` does.
    """
    renderer, longest = (None, None) if model is None else _renderer(model, settings, root)
    engine = Ingest(settings, work, root, renderer, longest)
    spill, _ = engine.split("pool", pool)
    totals = write_splits(work, spill, {"pool": ("pool", "pool_tokens" if model is not None else None)})
    engine.close()
    return summary(engine, totals, {}, work)


def _renderer(
    model: ModelConfig, settings: IngestConfig, root: Path
) -> tuple[Callable[[], Renderer], Callable[[], int] | None]:
    folder = root / model.path if model.path is not None else None
    if folder is not None and (folder / "tokenizer.json").is_file() and not (folder / "config.json").is_file():
        return lambda: _from_tokenizer(folder, settings), None
    pin = cache(lambda: pin_model(model, root, resize=settings.resize_embeddings))
    return renderer_for(pin, settings), lambda: pin().longest


def _from_tokenizer(folder: Path, settings: IngestConfig) -> Renderer:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder.name} holds a tokenizer", str(error), "check tokenizer.json") from error
    if not tokenizer.is_fast:
        raise ModelError("a fast tokenizer", f"{type(tokenizer).__name__} is slow", "add tokenizer.json to its folder")
    return Renderer(tokenizer, supervise=settings.supervise, system_role=settings.system_role)
