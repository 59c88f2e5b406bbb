"""`lazytrain train`: train on every row of a plain file, by a plan made for it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from data_contracts.arrow import TABLE_FILE, write_table
from data_contracts.tables import SELECTION
from flows.command.plain import Plain, merged, model_of, nested, show_refused
from flows.command.screen import console
from flows.command.settings import MINIMAL, sections, settings
from stages.stage import Artifact

app = typer.Typer(add_completion=False)


@app.command()
def train(
    data: Annotated[list[Path], typer.Option(help="Training rows; may be repeated.")],
    model: Annotated[str, typer.Option(help="The model's folder or hub name.")],
    validation: Annotated[
        list[Path] | None, typer.Option(help="Chooses the checkpoint; unset: the training rows.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML or JSON of settings (see `lazytrain init --schema`).")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Such as 6GB: the plan keeps within it.")] = None,
    max_len: Annotated[int, typer.Option(min=2, help="Tokens of the longest row.")] = 1024,
    options: Annotated[list[str] | None, typer.Option("--set", help="section.key=value.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Keep the checkpoint here.")] = None,
) -> None:
    """Train on plain files."""
    chosen = {
        "seed": seed,
        "model": model_of(model),
        "ingest": {"longest_tokens": max_len},
        "select": {"fraction": 1.0},
        "budget": {"peak_bytes": memory} if memory else {},
    }
    values = merged(MINIMAL, chosen, sections(config), nested(settings(options)))
    with tempfile.TemporaryDirectory() as scratch:
        plain = Plain(out or Path(scratch), values)
        rows = plain.files("data", data)
        show_refused(rows["quarantine"])
        held = plain.files("validation", validation) if validation else rows
        if not validation:
            console().print("note: no --validation: the loss that chooses the checkpoint is that of the training rows")
        base = plain.base()
        planned, _ = plain.call("plan", base=base, pool_tokens=rows["tokens"])
        made, _ = plain.call(
            "train",
            base=base,
            plan=planned["plan"],
            tokens=rows["tokens"],
            selection=everything(plain, rows["tokens"]),
            validation_tokens=held["tokens"],
        )
        if out is not None:
            place = out / "checkpoint"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(made["checkpoint"].folder, place)
            console().print(f"checkpoint in {place}", soft_wrap=True)


def everything(plain: Plain, tokens: Artifact) -> Artifact:
    """Return a selection of every row of a table of tokens, once, in its order."""
    table = tokens.table()
    count = table.num_rows
    columns = {
        "rank": np.arange(count, dtype=np.int32),
        "example_id": table.column("example_id").to_pylist(),
        "weight": np.ones(count, dtype=np.float32),
        "repeats": np.ones(count, dtype=np.int32),
        "order": np.zeros(count, dtype=np.int32),
        "mixture": table.column("source").to_pylist(),
        "gain": [None] * count,
        "reason": ["every row of the file"] * count,
    }
    folder = plain.out / "selection"
    write_table(folder / TABLE_FILE, SELECTION.schema, columns)
    return plain.artifact("selection", "selection", folder)
