"""A turn of the loop as a flow run of its own, so that Prefect's pages show each round with its stages inside.

It is the same process and the same thread. How a turn ends is how the call ends: its value, its typed error, a signal.
Nothing of the loop is a parameter or a kept result of the flow, so the server holds a number a round and nothing else.
What is done in a turn is the pipeline's business, and that a loop also turns without Prefect that of `pipeline_run`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from prefect import flow, tags
from prefect.context import FlowRunContext

from flows.labels import sign
from stages.ending import terminated_by_signal

S = TypeVar("S")


def as_subflow(number: int, turn: Callable[[], S]) -> S:
    """Do `turn` in the flow run `round-{number}` below the current one, and return what it returns."""

    @flow(
        name="round",
        flow_run_name="round-{number}",
        description="One turn of a pipeline's loop: score, mix, select, train, and decide.",
        log_prints=False,
        persist_result=False,
        validate_parameters=False,
    )
    def one(number: int) -> S:
        sign()
        return turn()

    context = FlowRunContext.get()
    found = context.flow_run.tags if context is not None and context.flow_run is not None else []
    # Prefect hands no tag down, and automations look at what has theirs. A ctrl-C that comes after a flow run's final
    # state it drops: here it stays asked for.
    with terminated_by_signal(), tags(*found):
        return one(number)
