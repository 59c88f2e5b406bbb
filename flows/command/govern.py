"""`lazytrain govern`: feed a file of evaluations to the stop rule and see where it stops and what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from flows.command.screen import console
from flows.command.settings import settings

app = typer.Typer(add_completion=False)


@app.command()
def govern(
    evals: Annotated[Path, typer.Option(help="JSON lines with `step` and the watched metric.")],
    metric: Annotated[str, typer.Option(help="The watched value.")] = "eval_loss",
    direction: Annotated[
        Literal["minimise", "maximise"] | None, typer.Option(help="Needed where the name does not tell.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="The policy: asha, fixed_rounds, gain_left, marginal_gain, median_stop, patience or share_past_best."
        ),
    ] = "patience",
    patience: Annotated[int, typer.Option(min=1, help="Evaluations without improvement, for the policy patience.")] = 2,
    most_forgotten: Annotated[
        float | None, typer.Option(min=0, help="Nats that `retention_loss` may rise above the first; unset: any.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the policy, name=value; an unknown name lists them."),
    ] = None,
) -> None:
    """Feed a file of evaluations to the stop rule."""
    from stages.govern.plain import replay

    rule: dict[str, Any] = {"method": policy, **({"patience": patience} if policy == "patience" else {})}
    report = replay(evals, rule | settings(options), metric, direction, most_forgotten)
    for line in report.log:
        console().print(Text(line), soft_wrap=True)
    end = f"stopped at step {report.stopped_at}" if report.stopped_at is not None else "no stop"
    console().print(Text(f"{end}: {report.reason}"), soft_wrap=True)
    console().print(Text(f"kept: step {report.best_step}, {metric} {report.best_value}"), soft_wrap=True)
    if report.non_finite_steps:
        console().print(Text(f"not finite at steps {', '.join(map(str, report.non_finite_steps))}"), soft_wrap=True)
