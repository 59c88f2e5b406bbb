"""Signals end the work at once, and wait where it is held together."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from data_contracts.errors import ArtifactError, BudgetError, InputError
from stages.ending import explained, terminated_by_signal


class Interrupted(KeyboardInterrupt):
    """What a command makes of ctrl-C."""


def interrupted(number: int, frame: Any) -> None:
    raise Interrupted


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, interrupted)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "end"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, Interrupted)])
def test_a_signal_waits_until_the_outermost_hold_has_ended(number: signal.Signals, end: type[BaseException]) -> None:
    done = []

    def work() -> None:
        with terminated_by_signal() as ending:
            with ending.held():
                with ending.held():
                    os.kill(os.getpid(), number)
                    done.append("inner")
                done.append("outer")
            done.append("after")

    with pytest.raises(end):
        work()
    assert done == ["inner", "outer"]


@pytest.mark.parametrize(("number", "end"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, Interrupted)])
def test_a_signal_ends_what_is_not_held_at_once(number: signal.Signals, end: type[BaseException]) -> None:
    done = []

    def work() -> None:
        with terminated_by_signal():
            os.kill(os.getpid(), number)
            done.append("after")

    with pytest.raises(end) as caught:
        work()
    assert done == []
    if number == signal.SIGTERM:
        assert caught.value.code == 143  # type: ignore[attr-defined]


@pytest.mark.parametrize(("number", "end"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, Interrupted)])
@pytest.mark.parametrize("holds", [True, False])
def test_an_end_that_a_library_swallowed_comes_where_the_work_would_be_committed_or_is_over(
    number: signal.Signals, end: type[BaseException], holds: bool
) -> None:
    done = []

    def work() -> None:
        with terminated_by_signal() as ending:
            with suppress(BaseException):
                os.kill(os.getpid(), number)
            done.append("went on")
            if holds:
                with ending.held():
                    done.append("committed")

    with pytest.raises(end):
        work()
    assert done == ["went on"]


def test_handlers_are_given_back_and_an_error_inside_a_hold_is_the_one_that_is_seen() -> None:
    def work() -> None:
        with terminated_by_signal() as ending, ending.held():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        work()
    assert signal.getsignal(signal.SIGINT) is interrupted


def test_errors_of_the_machine_are_told_as_refusals_and_others_speak_for_themselves() -> None:
    assert isinstance(explained(OSError(errno.ENOSPC, "full"), "train", "here"), ArtifactError)
    assert isinstance(explained(MemoryError(), "train", "here"), BudgetError)
    for error in (ValueError("a bug"), InputError("a", "b", "c"), SystemExit(143)):
        assert explained(error, "train", "here") is None
