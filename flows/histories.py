"""Past runs: which one an id means, and its own history as laws read it: its evaluations and the size of its model.

Writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_contracts.arrow import TABLE_FILE, read_table
from data_contracts.errors import ArtifactError
from data_contracts.records import Decision, ModelPin
from data_contracts.store import Store
from flows.workspace import Workspace
from stages.governor.state import State


@dataclass(frozen=True)
class History:
    """What a run has shown: its evaluations, and its model's parameters with and without embedding and head."""

    run: str
    state: State
    parameters: int
    body: int


def match(runs: list[Any], start: str | None) -> Any:
    """Return the run whose id begins with `start`, or the newest. Raises `ArtifactError` for none or several."""
    found = [item for item in runs if start is None or item.run.startswith(start)]
    if not found or (start is not None and len(found) > 1):
        raise ArtifactError(
            "the id of one pipeline run, or the start of it",
            f"{len(found)} runs begin with {start!r}",
            "see `lazytrain status`",
        )
    return found[0]


def history_of(workspace: Workspace, start: str) -> History:
    """Return the history, up to its latest decision, of the run whose id begins with `start`.

    Raises `ArtifactError` where no run, or several, begin so, and where it has not come to a decision.
    """
    store = None if workspace.unused else Store(workspace.address)
    past = match(store.runs() if store is not None else [], start)
    assert store is not None, "without a store there is no run to match"
    attempts = store.attempts(past.run)
    decided = [
        (store.record(item.refs["decision"], Decision).round, item.run) for item in attempts if "decision" in item.refs
    ]
    if not decided:
        raise ArtifactError("a run with a decision", f"{start} has none yet", "wait until its warm-up is done")
    manifest = store.read_manifest(max(decided)[1])
    curves = [read_table(store.open(ref) / TABLE_FILE) for ref in manifest.inputs["curve"]]
    pin = next(store.record(item.refs["base"], ModelPin) for item in attempts if "base" in item.refs)
    ends = (pin.grown_vocabulary or pin.vocabulary) * pin.hidden * (1 if pin.tied_embeddings else 2)
    return History(past.run, State.from_curves(curves), pin.parameters, pin.parameters - ends)
