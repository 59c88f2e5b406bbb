"""The pipeline, to its verdict, on a tiny race, in processes that kill themselves: at a named moment, with SIGKILL.

A moment is a stage call and a place in it: `asked` (nothing done), `part` (a snapshot or a shard has just been kept:
the middle of a training, a probe or a scoring), `made` (all is computed, nothing published), `published` (before the
commit) and `committed` (before anyone was told). The process is forked from one that has loaded torch, so that a kill
costs what starting again costs a loop and not what starting Python costs. No Prefect, a real store.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib.figure
import mlflow
import scipy.stats
import torch
import transformers.models.llama.modeling_llama

from data_contracts.config import ARMS
from data_contracts.records import Decision, Ref, Result
from data_contracts.store import Lease, Store
from flows.calling import call_directly
from flows.pipeline import concluded, trained
from flows.pipeline_run import PipelineRun, recorded
from flows.workspace import Workspace
from stages.admission import parse_slice
from stages.identity import stage_version
from stages.score.shards import ShardFolder
from stages.stage import VERBS, find_stage
from stages.train.snapshot import Snapshots
from stages.work import Desk
from tests.flows.small_run import lay_out
from tests.stores import blank

LOADED = (matplotlib, mlflow, scipy, torch, transformers)
"""Once, before processes are forked."""
FORK = multiprocessing.get_context("fork")
PLACES = ("asked", "part", "made", "published", "committed")
RACE = {
    "arms": [{**ARMS["influence"], "fraction": 0.4}, {**ARMS["random"], "fraction": 0.5}],
    "confidence": 0.99,
    "probe_share": 0.05,
    "least_steps": 3,
    "sample": 0.9,
    "most_probes": 1.0,
}


@dataclass(frozen=True, order=True)
class Moment:
    """The `count`-th time that a call stands at a place."""

    call: str
    place: str
    count: int = 1


def write(
    folder: Path,
    shared: Path,
    budget: Mapping[str, float],
    auto: Mapping[str, Any],
    govern: Mapping[str, Any] = MappingProxyType({"rounds": 3}),
) -> Path:
    """Write a folder of 32 rows, with evaluations enough for the default policy; return the configuration's path."""
    folder.mkdir(exist_ok=True)
    path = lay_out(
        folder,
        shared,
        budget=dict(budget),
        auto=dict(auto),
        store={"tracking_uri": blank(folder).tracking_uri},
        ingest={"longest_tokens": 64},
        plan={"window": 4, "micro_batches": [4], "techniques": [{"method": "full"}], "precision": "float32"},
        score={"batch_tokens": 512},
        train={"evaluations": 6, "snapshot_steps": 1},
        govern=dict(govern),
    )
    for name, rows in (("pool", 32), ("validation", 4)):
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        (folder / f"{name}.jsonl").write_text("\n".join(lines[:rows]) + "\n", encoding="utf-8")
    return path


class Clock:
    """Counts moments as they pass and, at one of them, kills its process."""

    def __init__(self, end: Moment | None) -> None:
        self.end, self.call = end, ""
        self.passed: Counter[tuple[str, str]] = Counter()

    def at(self, place: str) -> None:
        """Say that the call stands at a place."""
        self.passed[self.call, place] += 1
        if self.end == Moment(self.call, place, self.passed[self.call, place]):
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, owner: type, name: str, place: str) -> None:
        """Let every call of a method end at `place`."""
        method = getattr(owner, name)

        def counted(*given: Any, **named: Any) -> Any:
            found = method(*given, **named)
            self.at(place)
            return found

        setattr(owner, name, counted)

    def make(self, workspace: Workspace, verb: str, inputs: dict[str, tuple[Ref, ...]], **how: Any) -> Result:
        """Make a stage call whose moments are counted."""
        self.call = how["origin"].name
        self.at("asked")
        return call_directly(workspace, verb, inputs, **how)


def told(run: PipelineRun) -> dict[str, Any]:
    """Return what came of a run: its decisions, every call's digests (none of an effect), and what was reused."""
    return {
        "decisions": [decision.model_dump(mode="json") for decision in run.decisions],
        "digests": {
            step.name: {name: ref.digest for name, ref in step.refs.items() if step.stage != "promote"}
            for step in run.steps
        },
        "reused": [step.name for step in run.steps if step.cached],
    }


def _live(path: Path, end: Moment | None, answer: Path) -> None:
    clock = Clock(end)
    clock.after(Snapshots, "write", "part")
    clock.after(ShardFolder, "write", "part")
    clock.after(Desk, "finish", "made")
    clock.after(Store, "publish", "published")
    clock.after(Lease, "commit", "committed")
    workspace = Workspace.read(path)
    store = Store(workspace.address)
    before = store.runs()
    with recorded(workspace, store, clock.make, "loop", before[0].run if before else None) as run:
        made = trained(run)
        concluded(run, made)
        passed = [[*where, count] for where, count in clock.passed.items()]
        said = told(run) | {"passed": passed, "candidate": made.candidate[0].digest, "modules": sorted(sys.modules)}
    answer.write_text(json.dumps(said), encoding="utf-8")


def live(path: Path, end: Moment | None = None) -> dict[str, Any] | None:
    """Run, or go on with, the loop of a configuration in a process of its own.

    Returns what came of it, None where the process was killed at `end`.
    """
    answer = path.parent / "answer.json"
    answer.unlink(missing_ok=True)
    config = Workspace.read(path).config
    for stage in map(find_stage, VERBS):  # every source is read once, here
        stage_version(stage, parse_slice(stage, config.slice(stage.verb)))
    gc.collect()
    gc.freeze()  # the collector of the fork then copies no page
    process = FORK.Process(target=_live, args=(path, end, answer))
    process.start()
    process.join(300)
    if process.exitcode == -signal.SIGKILL and end is not None:
        return None
    assert process.exitcode == 0, f"the loop ended with {process.exitcode}"
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    for name in found.pop("modules"):  # the next processes find them loaded
        if not name.startswith("__"):
            with suppress(Exception):
                import_module(name)
    return found


def moments(whole: Mapping[str, Any]) -> list[Moment]:
    """Return the moments of an undisturbed run in their order; of those that recur, the middle one."""
    found = [Moment(call, place, (count + 1) // 2) for call, place, count in whole["passed"]]
    calls = list(whole["digests"])
    return sorted(found, key=lambda moment: (calls.index(moment.call), PLACES.index(moment.place)))


def killed(path: Path, wanted: Iterable[Moment]) -> dict[str, Any]:
    """Kill a loop at one moment after the other and return what came of it in the end."""
    for moment in wanted:
        assert live(path, moment) is None, f"it went past {moment}"
    found = live(path)
    assert found is not None
    return found


def committed(path: Path) -> list[Decision]:
    """Return the decisions that a store holds, oldest first."""
    store = Store(Workspace.read(path).address)
    refs = {
        row.refs["decision"].digest: row.refs["decision"]
        for past in reversed(store.runs())
        for row in store.attempts(past.run)
        if "decision" in row.refs
    }
    return [store.record(ref, Decision) for ref in refs.values()]
