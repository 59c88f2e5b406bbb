"""`lazytrain quickstart`: the whole chain on a small real model and real text, on two cores without a GPU.

It writes a configuration and its data into a folder, fetches the model where it is not here yet, and runs the
pipeline. Running it again reuses every stage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from data_contracts.config import ModelConfig
from flows.command import quickstart_data
from flows.command.model import pull
from flows.command.run import OutcomeFile, execute
from flows.workspace import CONFIG_FILE

app = typer.Typer(add_completion=False)

TEMPLATE = """\
# The quick start: teach a small chat model to answer trivia in a word or two.
# Change a value and run `lazytrain run {file}`: that stage and those after it run again, nothing before it.

name: quickstart
seed: 0

model:
  {model}

data:
  pool: data/pool          # small talk, code, pages of the Python manual, and some trivia
  target: data/target.jsonl        # what good means: short answers to trivia questions
  validation: data/validation.jsonl  # chooses checkpoints and stops training
  holdout: data/holdout.jsonl        # only the evaluation at the end reads it

budget:
  peak_bytes: 5GB          # the plan picks a way of training that fits
  flops: 3e13

ingest:
  longest_tokens: 128

begin:
  fraction: 0.05           # a warm-up on random rows: what scoring and planning start from

score:
  scorer: {{method: influence}}
  batch_tokens: 512        # tokens a forward and backward pass: memory, not result

select:
  selector: {{method: top_k}}
  fraction: 0.25           # of the pool

train:
  epochs: 1                # of the selection, in each round
  evaluations: 2           # on validation, in each round

govern:
  rounds: 2
"""


@app.command()
def quickstart(
    folder: Annotated[Path, typer.Option(help="Where configuration, data and results go.")] = Path("quickstart"),
    outcome: OutcomeFile = None,
) -> None:
    """Run the whole chain on a small real model and real text."""
    execute(write(folder), outcome)


def write(folder: Path, sizes: quickstart_data.Sizes = quickstart_data.SIZES) -> Path:
    """Write the data and the configuration where they are not there yet; return the configuration's path."""
    config = folder / CONFIG_FILE
    if not config.is_file():
        model = pull()
        quickstart_data.write(folder / "data", sizes)
        config.write_text(TEMPLATE.format(file=config, model=_model(model)), encoding="utf-8")
    return config


def _model(model: ModelConfig) -> str:
    if model.path is not None:
        return f"path: {json.dumps(model.path)}"
    return f"hub: {model.hub}\n  revision: {model.revision}"
