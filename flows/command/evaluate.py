"""`lazytrain evaluate`: mark a file of predictions, or look for evaluation items among training rows.

It ends with exit code 2 where training rows meet evaluation items: a score measured there would not be one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from data_contracts.errors import EXIT_REFUSED, ConfigError
from data_contracts.records import Table
from flows.command.screen import console, rich_table

app = typer.Typer(add_completion=False)


@app.command()
def evaluate(
    predictions: Annotated[Path | None, typer.Option(help="JSON lines with id, reference, prediction.")] = None,
    metric: Annotated[str, typer.Option(help="final-number or normalised-text.")] = "final-number",
    evaluation: Annotated[Path | None, typer.Option("--eval", help="Evaluation items, JSON lines.")] = None,
    train: Annotated[Path | None, typer.Option(help="Training rows, JSON lines.")] = None,
    overlap: Annotated[bool, typer.Option("--check-overlap", help="Look for --eval in --train.")] = False,
) -> None:
    """Evaluate a file of predictions, or look for overlap with training data."""
    if overlap:
        if evaluation is None or train is None:
            raise ConfigError("`--check-overlap` has two files to compare", "one is missing", "give --eval and --train")
        check(evaluation, train)
    elif predictions is not None:
        mark(predictions, metric)
    else:
        raise ConfigError(
            "something to evaluate", "neither --predictions nor --check-overlap", "see `lazytrain evaluate --help`"
        )


def mark(predictions: Path, metric: str) -> None:
    """Print each prediction's score and what was read from it, and the mean."""
    from stages.evaluate.plain import mark_predictions

    marked = mark_predictions(predictions, metric)
    columns = ("id", "score", "extracted", "reference", "prediction", "note")
    rows = tuple(
        (item.id, item.score, item.extracted, item.reference, item.prediction, item.note) for item in marked.items
    )
    console().print(rich_table(Table(title=f"{metric}: {len(rows)} items", columns=columns, rows=rows)))
    mean = "–" if marked.mean is None else f"{marked.mean:.4f}"
    console().print(f"mean {mean} over {marked.scored} of {len(rows)} items")


def check(evaluation: Path, train: Path) -> None:
    """Print every meeting of a training row with an evaluation item. Ends with exit code 2 where there is one."""
    from stages.evaluate.plain import check_overlap

    found = check_overlap(evaluation, train)
    for meeting in found.meetings:
        console().print(Text(f"{meeting.example_id} meets {meeting.item_id}: {meeting.kind}: {meeting.detail}"))
    console().print(
        f"{len(found.affected)} of {found.items} evaluation items affected; {found.rows} training rows read"
    )
    if not found.passed:
        console().print(
            Text("failed: remove those rows from training, or those items from the evaluation", style="red")
        )
        raise typer.Exit(EXIT_REFUSED)
