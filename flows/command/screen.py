"""What the command shows: one console, progress bars with rate and remaining time, summaries as tables.

The bars are the runner's reporter. Where the output is no terminal there are no bars, only one line when a piece of
work has ended, so that a log stays readable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from data_contracts.records import Summary, Table
from flows.readable import duration, size, text

QUIET_SECONDS = 5.0
"""Without a terminal, shorter work is not mentioned."""


@cache
def console() -> Console:
    """Return the console of this process: standard output as it stands, plain where it is no terminal."""
    return Console(highlight=False)


class Rate(ProgressColumn):
    """Units a second, in the unit of the work."""

    def render(self, task: Task) -> Text:
        """Return such as `1.2 kB/s` or `340 rows/s`; empty before the first measurement."""
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        unit = task.fields.get("unit", "")
        return Text(f"{size(int(speed))}/s" if unit in ("B", "bytes") else f"{speed:,.4g} {unit}/s", style="dim")


class Bar:
    """One progress bar."""

    def __init__(self, progress: Progress | None, what: str, total: float | None, unit: str) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=total, unit=unit) if progress else None

    def advance(self, amount: float = 1) -> None:
        """Move the bar by `amount` units."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, amount)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)


class Screen:
    """The reporter of a command: shows the work that a stage does and what it has to say."""

    def __init__(self) -> None:
        self._live: Progress | None = None
        self._open = 0

    @contextmanager
    def progress(self, what: str, total: float | None, unit: str) -> Iterator[Bar]:
        """Show a bar for the time of the block."""
        started = time.monotonic()
        if console().is_terminal and self._live is None:
            self._live = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                Rate(), TimeRemainingColumn(), console=console(), transient=True,
            )  # fmt: skip
            self._live.start()
        self._open += 1
        bar = Bar(self._live, what, total, unit)
        try:
            yield bar
        finally:
            bar.close()
            self._open -= 1
            if self._live is not None and self._open == 0:
                self._live.stop()
                self._live = None
            seconds = time.monotonic() - started
            if not console().is_terminal and seconds >= QUIET_SECONDS:
                console().print(f"  {what}: {duration(seconds)}")

    def notice(self, words: str) -> None:
        """Say something once."""
        console().print(Text(f"  note: {words}", style="yellow"))


_SCREEN = Screen()


def screen() -> Screen:
    """Return the reporter of this process."""
    return _SCREEN


def progress_of(what: str, total: float | None, unit: str) -> AbstractContextManager[Bar]:
    """Show a bar for the time of the block, outside any stage."""
    return _SCREEN.progress(what, total, unit)


def show(summary: Summary) -> None:
    """Print a stage's summary: its facts, its tables, its notices."""
    out = console()
    out.print(Text(summary.title, style="bold"))
    for name, value in {**summary.facts, **summary.measured}.items():
        out.print(Text(f"  {name:<28} {text(value)}"))
    for table in summary.tables:
        out.print(rich_table(table))
    for words in summary.notices:
        out.print(Text(f"  note: {words}", style="yellow"))


def rich_table(table: Table) -> RichTable:
    """Return a small table ready to print."""
    shown = RichTable(title=table.title, title_justify="left", title_style="bold")
    for position, column in enumerate(table.columns):
        numeric = all(isinstance(row[position], int | float) for row in table.rows) and bool(table.rows)
        shown.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(text(value)) for value in row))
    return shown
