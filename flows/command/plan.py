"""`lazytrain plan`: what would be done and what it costs, without training.

With a configuration file it reads and tokenises the data and plans, in this process and without a server; both are
committed, so that a run afterwards reuses them. With `--model` it plans for plain files, or for the model alone.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from data_contracts.arrow import TABLE_FILE, rows_of, write_table
from data_contracts.errors import ModelError
from data_contracts.records import Origin, Plan, Ref, Result, Table
from data_contracts.tables import TOKENS
from flows.command.plain import Plain, merged, model_of, nested, show_refused
from flows.command.screen import console, rich_table, screen, show
from flows.command.settings import MINIMAL, sections, settings
from flows.environment import prepare
from flows.readable import size, text
from flows.workspace import CONFIG_FILE, Workspace
from stages.model.pin import read_pin
from stages.model.tokenise import PAST_EMBEDDING
from stages.stage import Artifact

app = typer.Typer(add_completion=False)


@app.command()
def plan(
    file: Annotated[Path, typer.Argument(metavar="[config]", help="The configuration file.")] = Path(CONFIG_FILE),
    model: Annotated[str | None, typer.Option(help="Plan for this model instead of a configuration.")] = None,
    pool: Annotated[list[Path] | None, typer.Option(help="Rows to plan for (with --model).")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML or JSON of settings (with --model).")] = None,
    memory: Annotated[str | None, typer.Option(help="Such as 6GB (with --model).")] = None,
    max_len: Annotated[int, typer.Option(min=2, help="Tokens of the longest row (with --model).")] = 1024,
    options: Annotated[list[str] | None, typer.Option("--set", help="section.key=value (with --model).")] = None,
    explain: Annotated[
        bool, typer.Option(help="Also say what each way of choosing must gain to pay for itself.")
    ] = False,
) -> None:
    """Say what would be done and what it costs, without training."""
    if model is None:
        workspace = Workspace.read(file).check()
        made, data = preview(workspace)
        if explain:
            from flows.command.explain import explain_arms

            explain_arms(made, workspace, data["pool"][0].rows, data)
        return
    chosen = {
        "model": model_of(model),
        "ingest": {"longest_tokens": max_len},
        "budget": {"peak_bytes": memory} if memory else {},
    }
    values = merged(MINIMAL, chosen, sections(config), nested(settings(options)))
    with tempfile.TemporaryDirectory() as scratch:
        plain = Plain(Path(scratch), values)
        base = plain.base()
        if pool:
            rows = plain.files("pool", pool)
            show_refused(rows["quarantine"])
            stop_past_the_embedding(rows["quarantine"])
            plain.call("plan", base=base, pool_tokens=rows["tokens"], pool=rows["examples"])
        else:
            plain.call("plan", base=base, pool_tokens=longest_row(plain, base, max_len))


def stop_past_the_embedding(quarantine: Artifact) -> None:
    """Raise `ModelError` where rows were refused for a token that the model has no embedding for.

    A run would go on without these rows; who asks for a plan is told first.
    """
    rows = [row for row in rows_of(quarantine.batches()) if row["reason"] == PAST_EMBEDDING]
    if rows:
        first = rows[0]
        where = f"{first['file']} row {first['row']}"
        raise ModelError(
            "every token of the data has a row in the model's embedding",
            f"{len(rows)} row(s) hold one that has none, the first is {where}: {first['detail']}",
            "resize the embedding (`ingest.resize_embeddings: true`) and train it, or drop the token",
        )


def longest_row(plain: Plain, base: Artifact, tokens: int) -> Artifact:
    """Return a table of one row as long as is planned for (no longer than the model was made for)."""
    count = min(tokens, read_pin(base).longest)
    columns = {
        "example_id": ["0" * 32],
        "source": ["the longest row"],
        "input_ids": [[0] * count],
        "answer_mask": [[False] + [True] * (count - 1)],
        "n_tokens": [count],
        "n_answer_tokens": [count - 1],
        "truncated": [False],
    }
    folder = plain.out / "longest"
    write_table(folder / TABLE_FILE, TOKENS.schema, columns)
    return plain.artifact("tokens", "tokens", folder)


def preview(workspace: Workspace) -> tuple[Plan, dict[str, tuple[Ref, ...]]]:
    """Ingest and plan, print both summaries and what a run would cost; return the plan and all references by name."""
    prepare(workspace.home, offline=workspace.offline)
    from data_contracts.store import Store

    ingested = _stage(workspace, "ingest")
    needs = {name: ingested.ref(name) for name in ("base", "pool_tokens", "target_tokens", "pool")}
    store = Store(workspace.address)
    quarantine = ingested.refs["quarantine"]
    stop_past_the_embedding(Artifact(quarantine, store.open(quarantine)))
    planned = _stage(workspace, "plan", **needs)
    for result in (ingested, planned):
        show(store.read_manifest(result.run).summary)
    chosen = store.record(planned.refs["plan"], Plan)
    console().print(rich_table(steps_table(chosen, workspace, ingested.refs["pool"])))
    return chosen, {name: (ref,) for name, ref in (ingested.refs | planned.refs).items()}


def _stage(workspace: Workspace, verb: str, **inputs: tuple[Ref, ...]) -> Result:
    from stages.runner import run

    return run(workspace.request(verb, inputs, Origin(name=verb)), reporter=screen())


def steps_table(chosen: Plan, workspace: Workspace, pool: Ref) -> Table:
    """Return what a run would do with the plan, at most, and what it may spend."""
    config = workspace.config
    select = config.select
    if select.count is not None:
        share = min(1.0, select.count / pool.rows)
    elif select.fraction is not None:
        share = select.fraction
    else:
        share = min(1.0, (select.tokens or 0) * chosen.flops_per_token / chosen.pass_flops) if select.tokens else 1.0
    begun = min(pool.rows, max(config.begin.least_rows, math.ceil(config.begin.fraction * pool.rows)))
    warm_up = round(chosen.pass_flops * begun / pool.rows)  # one pass, whatever `train.epochs`
    segment = round(chosen.pass_flops * share * config.train.epochs)
    rounds = config.govern.rounds
    rows = (
        ("a warm-up on random rows", text(warm_up), size(chosen.peak_bytes)),
        ("scoring the pool once (as a training pass)", text(chosen.pass_flops), ""),
        (f"a segment on {share:.0%} of the pool", text(segment), size(chosen.peak_bytes)),
        (f"all, at most {rounds} rounds", text(warm_up + rounds * (chosen.pass_flops + segment)), ""),
        ("budget", text(config.budget.flops), size(config.budget.peak_bytes) if config.budget.peak_bytes else "–"),
    )
    return Table(title="What a run would cost", columns=("", "FLOPs", "peak memory"), rows=rows)
