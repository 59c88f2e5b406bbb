"""A training stage in a process of its own, to be killed: python -m tests.stages.train.killed HOUSE WORK WORKERS ROWS."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from data_contracts.config import GovernConfig, TrainConfig
from stages.train.stage import STAGE, TrainSlice
from tests.local_work import work_for
from tests.stages.train.small import House

LORA = {"method": "lora", "r": 4, "dropout": 0.1}
DIGESTS = "digests.json"


def config() -> TrainSlice:
    """Return the slice: a snapshot every 4 steps, evaluations between them; dropout needs the generators' states, and
    influence is read along a direction older than the snapshot."""
    return TrainSlice(
        seed=3,
        train=TrainConfig(
            learning_rate=5e-3, warmup_steps=3, epochs=2.0, evaluations=5, snapshot_steps=4, influence="evaluation"
        ),
        govern=GovernConfig(policy={"method": "patience", "patience": 50}),
    )


def house_of(folder: Path, workers: int, rows: int) -> House:
    """Return the inputs: three phases; a step holds 4 rows whatever the workers, long enough for their gradients to be
    formed."""
    plan = {"technique": LORA, "workers": workers, "micro_batch": 1, "accumulation": 4 // max(1, workers)}
    selection = {"order": [row % 3 for row in range(rows)]}
    return House(folder, rows=rows, plan=plan | {"row_tokens": 64}, longest=60, selection=selection)


def run(house: Path, folder: Path, workers: int, rows: int) -> dict[str, str]:
    """Run (or finish) the stage, note its outputs' digests in `folder` and return them."""
    work = work_for(STAGE, folder, seed=3)
    STAGE.run(config(), house_of(house, workers, rows).inputs(), work)
    digests = {name: work.artifact(name).ref.digest for name in sorted(work.opened)}
    (folder / DIGESTS).write_text(json.dumps(digests))
    return digests


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
