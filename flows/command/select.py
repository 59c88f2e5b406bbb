"""`lazytrain select`: choose from a plain file, by the same selectors, quotas and guards as in a run.

A file of scores, one of embeddings or both, or one of similarities for the selectors that compare rows with each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from data_contracts.config_file import parse
from data_contracts.errors import ConfigError
from data_contracts.method import names
from data_contracts.records import Table
from flows.command.screen import console, rich_table
from flows.command.settings import MINIMAL, settings
from stages.select.selector import Selector

app = typer.Typer(add_completion=False)


@app.command()
def select(
    scores: Annotated[Path | None, typer.Option(help="JSON lines, CSV or Arrow with an id and a score a row.")] = None,
    embeddings: Annotated[Path | None, typer.Option(help="Or JSON lines with an id and a vector a row.")] = None,
    similarity: Annotated[Path | None, typer.Option(help="Or a square CSV of similarities.")] = None,
    method: Annotated[str, typer.Option(help=f"The selector: {', '.join(names(Selector))}.")] = "top_k",
    budget: Annotated[int | None, typer.Option(min=1, help="How many examples.")] = None,
    fraction: Annotated[float | None, typer.Option(help="Or the share of all rows.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Or how many tokens.")] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the selector, name=value; an unknown name lists them."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="For selectors that draw.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the selection as JSON lines here.")] = None,
) -> None:
    """Choose examples from a file of scores, of embeddings, of both, or of similarities.

    A row of scores may hold its source, its length (n_tokens), whether its score was computed (exact) and a score for
    each target group (score.NAME); a row of embeddings its source and length. docs/selection.md says what each reads.
    """
    import numpy as np

    from stages.select.plain import select_scores
    from stages.select.plain_features import select_embeddings, select_similarities

    given = [file for file in (scores, embeddings, similarity) if file is not None]
    if not given or (similarity is not None and len(given) > 1):
        raise ConfigError(
            "--scores, --embeddings, both, or --similarity alone", f"{len(given)} files were given", "name the file"
        )
    quota: dict[str, Any] = {"count": budget, "fraction": fraction, "tokens": tokens}
    section = {
        "selector": {"method": method.replace("-", "_"), **settings(options)},
        **{k: v for k, v in quota.items() if v is not None},
    }
    config = parse({**MINIMAL, "seed": seed, "select": section}, "the options of this command")
    rng = np.random.default_rng(seed)
    if embeddings is not None:
        found = select_embeddings(embeddings, config.select, rng, scores=scores)
    elif similarity is not None:
        found = select_similarities(similarity, config.select, rng)
    else:
        found = select_scores(given[0], config.select, rng)
    rows = found.selection.to_pylist()
    columns = ("rank", "example_id", "weight", "repeats", "gain", "reason")
    shown = tuple(tuple(row[name] for name in columns) for row in rows[:20])
    console().print(rich_table(Table(title=f"Selected: {len(rows)}", columns=columns, rows=shown)))
    for refused in found.refused:
        console().print(Text(f"not chosen: {refused.example_id or f'row {refused.row}'}: {refused.detail}"))
    for notice in found.notices:
        console().print(Text(f"note: {notice}", style="yellow"))
    if out is not None and out.exists() and any(out.samefile(file) for file in given):
        raise ConfigError("--out is another file than the input", f"both are {out}", "name another file")
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        except OSError as error:
            raise ConfigError("--out is a file that can be written", str(error), "name another file") from error
