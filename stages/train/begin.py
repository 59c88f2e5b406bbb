"""The stage `begin`: a charged warm-up segment on a random selection of the pool.

It gives what the first plan and scoring need and nothing else can: Adam's moments, example losses, the gradient noise
scale, throughput, and the losses on validation and retention before anything is trained. It starts at the base, whose
learning rate warms up, or goes on from what an earlier run has trained (`start_from`). The same engine as `train`; it
makes one smaller step where the selection does not fill a window, whatever `train.drop_last` says, and is not ended by
a policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from data_contracts.arrow import TABLE_FILE, write_table
from data_contracts.config import BeginConfig, TrainConfig
from data_contracts.cost import Frozen
from data_contracts.errors import InputError
from data_contracts.method import Method
from data_contracts.records import Plan, Summary
from data_contracts.tables import SELECTION
from stages.model.pin import read_pin
from stages.stage import Inputs, Stage, Takes, Work
from stages.train.stage import place_of, techniques

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


class BeginSlice(Frozen):
    """What `begin` reads of the configuration."""

    seed: int
    begin: BeginConfig
    train: TrainConfig


class Begin(Stage[BeginSlice]):
    """Warm up."""

    verb: ClassVar[str] = "begin"
    config: ClassVar[type[Frozen]] = BeginSlice
    takes: ClassVar[Mapping[str, Takes]] = {
        "base": Takes("base"),
        "plan": Takes("plan"),
        "pool_tokens": Takes("tokens"),
        "validation_tokens": Takes("tokens"),
        "retention_tokens": Takes("tokens", optional=True),
        "start_from": Takes("checkpoint", optional=True),
    }
    gives: ClassVar[Mapping[str, str]] = {
        "checkpoint": "checkpoint",
        "curve": "curve",
        "validation_losses": "validation_losses",
        "retention_losses": "validation_losses",
        "example_losses": "example_losses",
        "selection": "selection",
    }
    optional: ClassVar[frozenset[str]] = frozenset({"retention_losses"})

    def external(self, config: BeginSlice, root: Path) -> dict[str, Any]:
        """Return the slice without where a run may begin, and the workers: checkpoint and plan are inputs."""
        return config.model_dump(mode="json", exclude={"begin": {"start"}, "train": {"workers"}})

    def methods(self, config: BeginSlice) -> Iterable[tuple[type[Method], str]]:
        """Name every technique: the plan, an input, decides which is used."""
        return techniques()

    def run(self, config: BeginSlice, inputs: Inputs, work: Work) -> Summary:
        """Draw the selection and train the warm-up segment on it."""
        from stages.meter.machine import device_kind
        from stages.train.job import Job, Places
        from stages.train.order import check_rows
        from stages.train.publish import train_segment

        pool, validation = inputs.one("pool_tokens"), inputs.one("validation_tokens")
        start = inputs.maybe("start_from")
        check_rows(validation.ref.rows)
        chosen = random_selection(pool.table(), config.begin, work.rng("begin", "selection"))
        place = work.folder / "selection" / TABLE_FILE
        write_table(place, SELECTION.schema, chosen)
        work.table("selection", chosen)
        job = Job(
            folder=str(work.folder),
            places=Places(
                tokens=(str(pool.folder / TABLE_FILE),),
                selection=str(place),
                validation=str(validation.folder / TABLE_FILE),
                retention=place_of(inputs.maybe("retention_tokens")),
                checkpoint=str(start.folder) if start else None,
            ),
            inputs={name: tuple(item.ref.digest for item in inputs.all(name)) for name in sorted(self.takes)},
            pin=read_pin(inputs.one("base")),
            plan=inputs.one("plan").record(Plan),
            train=config.train.model_copy(
                update={
                    "drop_last": False,
                    "epochs": 1.0,
                    "evaluations": 1,
                    "influence": None,
                    "batch_selector": None,
                }
            ),
            cause="warm_up",
            evaluate_start=True,
            order_seed=work.seed("begin", "order"),
            torch_seed=work.seed("begin", "torch"),
        )
        return train_segment(job, work, device=device_kind(), title="warm-up")


def random_selection(pool: pa.Table, begin: BeginConfig, rng: np.random.Generator) -> dict[str, list[Any]]:
    """Return selection columns of a uniform draw: a share of the pool's rows, at least `begin.least_rows` of them.

    Raises `InputError` for an empty pool.
    """
    rows = pool.num_rows
    if rows == 0:
        raise InputError("`pool` holds at least one usable row", "it has none", "look at the quarantine of ingest")
    count = min(rows, max(begin.least_rows, math.ceil(begin.fraction * rows)))
    drawn = rng.choice(rows, count, replace=False)
    ids, sources = pool.column("example_id").take(drawn).to_pylist(), pool.column("source").take(drawn).to_pylist()
    return {
        "rank": list(range(count)),
        "example_id": ids,
        "weight": [1.0] * count,
        "repeats": [1] * count,
        "order": [0] * count,
        "mixture": sources,
        "gain": [None] * count,
        "reason": ["drawn at random for the warm-up"] * count,
    }


STAGE = Begin()
