"""`lazytrain score`: what each row of a plain file is worth for a target, by the model as it is."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from data_contracts.arrow import rows_of
from data_contracts.records import Table
from flows.command.plain import Plain, ids_of, merged, model_of, nested, show_refused
from flows.command.screen import console, rich_table
from flows.command.settings import MINIMAL, settings

app = typer.Typer(add_completion=False)

SHOWN_ROWS = 20


@app.command()
def score(
    pool: Annotated[list[Path], typer.Option(help="File or folder; may be repeated.")],
    target: Annotated[list[Path], typer.Option(help="What good means; may be repeated.")],
    model: Annotated[str, typer.Option(help="The model's folder or hub name.")],
    method: Annotated[str, typer.Option(help="The scorer; docs/scoring.md lists them.")] = "influence",
    max_len: Annotated[int, typer.Option(min=2, help="Tokens of the longest row.")] = 1024,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens a forward and backward pass.")] = 4096,
    options: Annotated[list[str] | None, typer.Option("--set", help="section.key=value.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Keep the tables here, and scores.jsonl.")] = None,
) -> None:
    """Score plain files against a target."""
    chosen = {
        "seed": seed,
        "model": model_of(model),
        "ingest": {"longest_tokens": max_len},
        "score": {"scorer": {"method": method}, "batch_tokens": batch_tokens},
    }
    values = merged(MINIMAL, chosen, nested(settings(options)))
    with tempfile.TemporaryDirectory() as scratch:
        plain = Plain(out or Path(scratch), values)
        given, wanted, base = plain.files("pool", pool), plain.files("target", target), plain.base()
        made, _ = plain.call(
            "score",
            base=base,
            pool_tokens=given["tokens"],
            target_tokens=wanted["tokens"],
            pool=given["examples"],
            target=wanted["examples"],
        )
        names = ids_of(given["examples"])
        rows = [{"id": names[row["example_id"]], **row} for row in rows_of(made["scores"].batches())]
        rows.sort(key=lambda row: (row["score"] is None, -(row["score"] or 0.0)))
        columns = ("id", "score", "loss", "n_tokens", "n_answer_tokens")
        shown = tuple(tuple(row[name] for name in columns) for row in rows[:SHOWN_ROWS])
        console().print(rich_table(Table(title=f"Scores: {len(rows)}", columns=columns, rows=shown)))
        for part in (given, wanted, made):
            show_refused(part["quarantine"])
        if out is not None:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (out / "scores.jsonl").write_text(lines, encoding="utf-8")
            console().print(f"tables and scores.jsonl under {out}", soft_wrap=True)
