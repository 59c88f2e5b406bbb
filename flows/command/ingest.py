"""`lazytrain ingest`: read, check and tokenise a plain file, and list every row that is not used."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.command.plain import Plain, merged, model_of, nested, show_refused
from flows.command.screen import console
from flows.command.settings import MINIMAL, settings

app = typer.Typer(add_completion=False)


@app.command()
def ingest(
    pool: Annotated[list[Path], typer.Option(help="File or folder; may be repeated.")],
    model: Annotated[str | None, typer.Option(help="Model whose tokenizer is used; unset: examples only.")] = None,
    target: Annotated[list[Path] | None, typer.Option(help="Files that show what good means (with --model).")] = None,
    validation: Annotated[list[Path] | None, typer.Option(help="Unset: cut from the target.")] = None,
    holdout: Annotated[list[Path] | None, typer.Option(help="Unset: cut from the target.")] = None,
    retention: Annotated[list[Path] | None, typer.Option(help="What must not be forgotten.")] = None,
    dedupe: Annotated[Literal["near", "exact", "none"], typer.Option(help="Which duplicates are removed.")] = "near",
    max_len: Annotated[int | None, typer.Option(min=2, help="Tokens of the longest row.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, such as ingest.supervise=last.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Keep the tables here.")] = None,
) -> None:
    """Read, check and tokenise plain files."""
    chosen = {"dedupe": dedupe, **({"longest_tokens": max_len} if max_len else {})}
    splits = {"pool": pool, "target": target, "validation": validation, "holdout": holdout, "retention": retention}
    data = {name: [str(item) for item in files] for name, files in splits.items() if files}
    values = merged(MINIMAL, {"model": model_of(model), "data": data, "ingest": chosen}, nested(settings(options)))
    with tempfile.TemporaryDirectory() as scratch:
        plain = Plain(out or Path(scratch), values)
        made = plain.call("ingest")[0] if target and model else plain.files("pool", pool)
        show_refused(made["quarantine"])
        if out is not None:
            console().print(f"tables under {out}", soft_wrap=True)
