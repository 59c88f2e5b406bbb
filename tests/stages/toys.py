"""Small stages for the runner's tests, and an entry point that runs one in a process of its own.

`make` writes a selection of `rows` rows; `fold` takes one and writes a decision; both can be told by a knob to fail,
wait or misbehave. `main(path)` runs the request in a file and prints its result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from data_contracts.cost import Cost, Frozen
from data_contracts.records import Decision, Request, Summary
from stages.stage import Inputs, Stage, Takes, Work


class MakeSlice(Frozen):
    seed: int = 0
    rows: int = 3
    start: float = 1.0


def selection(rows: int, start: float) -> dict[str, list[Any]]:
    return {
        "rank": list(range(rows)),
        "example_id": [f"{i:032x}" for i in range(rows)],
        "weight": [start] * rows,
        "repeats": [1] * rows,
        "order": [0] * rows,
        "mixture": ["toy"] * rows,
        "gain": [None] * rows,
        "reason": ["toy"] * rows,
    }


class Make(Stage[MakeSlice]):
    verb = "select"
    config = MakeSlice
    takes = {}
    gives = {"selection": "selection", "quarantine": "quarantine"}

    def kin(self, config: MakeSlice, inputs: Inputs) -> Any:
        """Return what decides a row besides which rows there are."""
        return {"start": config.start}

    def run(self, config: MakeSlice, inputs: Inputs, work: Work) -> Summary:
        """Write the selection; knobs say how to misbehave."""
        earlier = work.earlier()
        count = work.folder / "visits"
        visits = int(count.read_text()) + 1 if count.exists() else 1
        count.write_text(str(visits))
        if log := work.knobs.get("log"):
            with Path(str(log)).open("a") as stream:
                stream.write(f"{os.getpid()}\n")
        work.charge("select", Cost(flops=7, tokens=2))
        with work.writer("selection") as writer:
            writer.extend(selection(config.rows, config.start))
        act(str(work.knobs.get("act", "")), work)
        if work.knobs.get("refuse"):
            for i in (2, 1):
                work.quarantine(split="pool", reason="toy", detail=f"row {i}", file="toy.jsonl", row=i)
        work.measured("selection", "times.json").write_text("{}")
        work.notice("a toy ran")
        return Summary(
            title="toy",
            facts={"rows": config.rows, "hits@1": 0.5, "hits_at_1": 0.9},
            measured={"visits": visits, "earlier": earlier.one("selection").ref.rows if earlier else 0},
        )


def act(how: str, work: Work) -> None:
    if how == "raise":
        raise RuntimeError("the toy broke")
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sigkill_once" and not (mark := work.folder / "killed").exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if how.startswith("sleep:"):
        Path(str(work.knobs["started"])).touch()
        time.sleep(float(how.partition(":")[2]))
    if how == "hoard":
        held = [bytearray(1 << 24)]
        while True:
            held.append(bytearray(1 << 24))
    if how.startswith("fill:"):
        with (work.folder / "large").open("wb") as stream:
            for _ in range(int(how.partition(":")[2])):
                stream.write(b"\0" * (1 << 20))
            stream.flush()
            os.fsync(stream.fileno())


class FoldSlice(Frozen):
    reason: str = "toy"


class Fold(Stage[FoldSlice]):
    verb = "govern"
    config = FoldSlice
    takes = {"selection": Takes("selection", many=True), "decision": Takes("decision", optional=True)}
    gives = {"decision": "decision"}
    reads_ledger = True

    def run(self, config: FoldSlice, inputs: Inputs, work: Work) -> Summary:
        """Decide by the number of rows and what was spent."""
        rows = sum(item.table().num_rows for item in inputs.all("selection"))
        numbers = {"rows": rows, "flops": work.spent().total.flops, "draw": float(work.rng("draw").random())}
        work.record("decision", Decision(action="continue", reason=config.reason, round=0, numbers=numbers))
        return Summary(title="folded", facts={"rows": rows})


class Effect(Fold):
    verb = "promote"
    effect = True


STAGES: dict[str, Stage[Any]] = {stage.verb: stage for stage in (Make(), Fold(), Effect())}


def find(verb: str) -> Stage[Any]:
    return STAGES[verb]


def main(path: str) -> None:
    from stages import runner

    runner.find_stage = find
    result = runner.run(Request.model_validate_json(Path(path).read_bytes()))
    print(result.model_dump_json())
    print(json.dumps({"torch": "torch" in sys.modules}), file=sys.stderr)
