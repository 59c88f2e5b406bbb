"""`lazytrain judge`: the gates on a folder of committed evidence: an evaluation, a candidate, what was trained on.

Pure: the same evidence gives the same verdict. It ends with exit code 2 where the verdict is not to promote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from data_contracts.errors import EXIT_REFUSED
from data_contracts.records import Verdict
from flows.command.plain import Plain, merged, nested
from flows.command.screen import console
from flows.command.settings import MINIMAL, sections, settings

app = typer.Typer(add_completion=False)


@app.command()
def judge(
    evaluation: Annotated[Path, typer.Option(help="Folder of the evaluation table.")],
    candidate: Annotated[Path, typer.Option(help="Folder of the candidate checkpoint.")],
    selection: Annotated[list[Path], typer.Option(help="Folder of a selection; repeat for every one trained on.")],
    pool: Annotated[Path, typer.Option(help="Folder of the pool's examples.")],
    holdout: Annotated[Path, typer.Option(help="Folder of the holdout's examples.")],
    target: Annotated[Path | None, typer.Option(help="Folder of the target's examples.")] = None,
    champion: Annotated[Path | None, typer.Option(help="Folder of the champion checkpoint.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML or JSON with a section `judge`.")] = None,
    options: Annotated[list[str] | None, typer.Option("--set", help="section.key=value.")] = None,
    out: Annotated[Path, typer.Option(help="Where the verdict goes.")] = Path("judged"),
) -> None:
    """Put an evaluation through the gates."""
    plain = Plain(out, merged(MINIMAL, sections(config), nested(settings(options))))
    made, _ = plain.call(
        "judge",
        evaluation=plain.artifact("evaluation", "evaluation", evaluation),
        candidate=plain.artifact("checkpoint", "checkpoint", candidate),
        champion=plain.artifact("checkpoint", "checkpoint", champion) if champion else None,
        selection=[plain.artifact("selection", "selection", item) for item in selection],
        pool=plain.artifact("pool", "examples", pool),
        target=plain.artifact("target", "examples", target) if target else None,
        holdout=plain.artifact("holdout", "examples", holdout),
    )
    verdict = made["verdict"].record(Verdict)
    console().print(Text(f"{verdict.outcome}: {verdict.reason}", style="bold"), soft_wrap=True)
    if verdict.outcome != "promote":
        raise typer.Exit(EXIT_REFUSED)
