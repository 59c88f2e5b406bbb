"""Trials: the pipeline's own loop (`flows.pipeline.trained`) once for every arm of a cell, without Prefect.

Arms of a cell share a store, so that what they have in common is done once; what each spent is told all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.cells import Losses
from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.config import Config
from data_contracts.config_file import parse
from data_contracts.cost import Frozen
from data_contracts.records import Origin, Plan, Ref, Result, Weighing
from data_contracts.store import Store
from flows.calling import call_directly
from flows.pipeline import Trained, trained
from flows.pipeline_run import PipelineRun
from flows.reading import reads_scores
from flows.workspace import Workspace

SHARED = ("plan", "begin", "govern")
"""Stages that an arm's own number of passes has no part in."""
CHOOSING = ("score", "mix", "select", "weigh")
PROBE = "train-race-"
"""How the calls of probes begin; an arm's name follows."""


class Trial(PipelineRun):
    """A run of the loop in this process; what all trials of a cell have in common is done once."""

    def __init__(self, workspace: Workspace, store: Store, run: str) -> None:
        super().__init__(workspace, store, run, call_directly)

    def _call(
        self, workspace: Workspace, verb: str, name: str, inputs: dict[str, tuple[Ref, ...]], refresh: bool
    ) -> Result:
        if verb in SHARED:
            train = workspace.config.train.model_copy(update={"epochs": 1.0})
            workspace = workspace.with_sections({"train": train})
        return super()._call(workspace, verb, name, inputs, refresh)

    @property
    def spent(self) -> int:
        """FLOPs of all that was done, each attempt once."""
        return sum({step.run: step.cost.flops for step in self.steps}.values())

    @property
    def choosing(self) -> int:
        """FLOPs of `spent` that went into choosing: scores, selections, and probes that the run did not go on from."""
        weighed = [step.refs["weighing"] for step in self.steps if step.stage == "weigh"]
        won = PROBE + self.store.record(weighed[-1], Weighing).chosen if weighed else ""
        return sum(
            {
                step.run: step.cost.flops
                for step in self.steps
                if step.stage in CHOOSING or (step.name.startswith(PROBE) and step.name != won)
            }.values()
        )

    @property
    def chose(self) -> bool:
        """Whether the rows that were trained on last were chosen by anything but chance."""
        return reads_scores(self.config.select)

    def validated(self) -> list[tuple[int, float]]:
        """Return (FLOPs spent until then, validation loss) of every evaluation of training, oldest first."""
        return [(flops, loss) for flops, _, loss in self.evaluations()]

    def evaluations(self) -> list[tuple[int, int, float]]:
        """Return (FLOPs spent until then, step of training, validation loss) of every finite evaluation, oldest first.

        A segment's own curve says what it had spent at each of its steps.
        """
        points, spent, seen = [], 0, set()
        for step in self.steps:
            if step.run in seen:
                continue
            seen.add(step.run)
            if step.stage in ("begin", "train"):
                curve = read_table(self.store.open(step.refs["curve"]) / TABLE_FILE).to_pylist()
                points += [
                    (spent + row["flops"], row["step"], row["validation_loss"])
                    for row in curve
                    if row["validation_loss"] is not None and np.isfinite(row["validation_loss"])
                ]
            spent += step.cost.flops
        return points


class Cell:
    """One target and seed: its splits on disk, and the store that its arms share."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        self.folder, self.values = folder, values
        self.store = Store(self.workspace(parse(values)).address)
        self.run = self.store.open_run("cell", parse(values).model_dump(mode="json"))
        first = Trial(self.workspace(parse(values)), self.store, self.run)
        self.data = first.call("ingest")
        self.planned = first.call(
            "plan",
            base=self.data.ref("base"),
            pool=self.data.ref("pool"),
            pool_tokens=self.data.ref("pool_tokens"),
            target_tokens=self.data.ref("target_tokens"),
        )
        self.pass_flops = first.read(self.planned, "plan", Plan).pass_flops

    def workspace(self, config: Config) -> Workspace:
        """Return a workspace on this cell's folder."""
        return Workspace(config, self.folder / "lazytrain.yaml", "lazytrain.yaml")

    def config(self, budget: float, sections: Mapping[str, Any]) -> Config:
        """Return the configuration of an arm, for a budget of so many passes over the pool."""
        limits = {"budget": {"flops": int(budget * self.pass_flops)}}
        merged = {name: {**self.values.get(name, {}), **part} for name, part in sections.items()}
        return parse({**self.values, **limits, **merged})

    def trial(self, config: Config) -> tuple[Trial, Trained]:
        """Run the loop with a configuration."""
        made = Trial(self.workspace(config), self.store, self.run)
        return made, trained(made)

    def scored(self, settings: Mapping[str, Frozen]) -> pa.Table:
        """Return the scores of the pool by the base, beside any trial and charged to none."""
        beside = Trial(self.workspace(parse(self.values)), self.store, self.run)
        found = beside.call_for(
            "beside",
            "score",
            settings,
            base=self.data.ref("base"),
            plan=self.planned.ref("plan"),
            **{name: self.data.ref(name) for name in ("pool_tokens", "target_tokens", "pool", "target")},
        )
        return read_table(self.store.open(found.refs["scores"]) / TABLE_FILE)

    def losses(self, checkpoint: tuple[Ref, ...]) -> Losses:
        """Return holdout (loss sum, answer tokens, task) by item, of a checkpoint or, without one, of the base."""
        return {
            row["item_id"]: (row["loss_sum"], row["answer_tokens"], row["source"])
            for row in self._judged(checkpoint)
            if row["loss_sum"] is not None
        }

    def answers(self, checkpoint: tuple[Ref, ...]) -> Losses:
        """Return holdout (1 where the greedy answer is right, 1, task) by item; needs the task `exact_match`."""
        return {
            row["item_id"]: (row["score"], 1, row["source"])
            for row in self._judged(checkpoint)
            if row["loss_sum"] is None and row["score"] is not None
        }

    def _judged(self, checkpoint: tuple[Ref, ...]) -> list[dict[str, Any]]:
        evaluated = call_directly(
            self.workspace(parse(self.values)),
            "evaluate",
            {**{name: self.data.ref(name) for name in ("base", "holdout", "holdout_tokens")}, "checkpoint": checkpoint},
            origin=Origin(run=self.run, name="evaluate"),
        )
        wanted = "candidate" if checkpoint else "base"
        table = read_table(self.store.open(evaluated.refs["evaluation"]) / TABLE_FILE).to_pylist()
        return [row for row in table if row["model"] == wanted]

    def close(self) -> None:
        """End the cell's run in its store."""
        self.store.close_run(self.run, "FINISHED", None)
