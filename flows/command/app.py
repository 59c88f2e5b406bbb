"""The `lazytrain` command: one lazily imported file a subcommand.

The table below is all that `lazytrain --help` reads, so it answers at once and imports neither torch, ray, prefect nor
mlflow. A `LazyTrainError` ends a command with its exit code and its three lines (found, expected, remedy); `--debug`
shows the traceback.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from data_contracts.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, LazyTrainError
from flows.environment import refuse_foreign_rooms

ENDED = "ended: what was committed is kept; the same command, or `lazytrain resume`, goes on\n"
COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": ("quickstart", "Run the whole chain on a small real model and real text."),
    "init": ("init", "Write a short commented configuration for your model, pool, target and budget."),
    "run": ("run", "Run the pipeline of a configuration; what is unchanged is reused."),
    "plan": ("plan", "Say what would be done and what it costs, without training."),
    "quote": ("quote", "Quote a run: will choosing pay, what loss, FLOPs, hours, money, joules."),
    "share": ("share", "Divide a common budget over the runs of several configurations."),
    "laws": ("laws", "Fit loss laws to a table of runs or a run's history; what more compute buys."),
    "stage": ("stage", "Run one stage again on a past run's inputs: a new attempt, history kept."),
    "resume": ("resume", "Go on with a run that did not finish, or under a higher budget."),
    "status": ("status", "Show runs, attempts, costs, decisions and the verdict."),
    "gc": ("gc", "List what no run refers to any more, and with --delete remove it."),
    "ui": ("ui", "Serve the Prefect and MLflow pages on this machine until ctrl-C."),
    "deploy": ("deploy", "Put the pipeline and its stages on a team's Prefect server."),
    "doctor": ("doctor", "Say what this machine can do, what is missing and what to do."),
    "model": ("model", "Fetch a model and pin it by digest (model pull)."),
    "ingest": ("ingest", "Read, check and tokenise plain files."),
    "score": ("score", "Score plain files against a target."),
    "select": ("select", "Choose examples from a file of scores."),
    "train": ("train", "Train on a plain file."),
    "govern": ("govern", "Feed a file of evaluations to the stop rule."),
    "evaluate": ("evaluate", "Mark a file of predictions, or look for overlap with training data."),
    "judge": ("judge", "Put an evaluation table through the gates."),
    "promote": ("promote", "Store a metrics file in a tracking store, no name lost."),
}


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are called; help lists them from `COMMANDS`."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return the command called `cmd_name`; in a listing, a stand-in with its help line."""
        if cmd_name not in COMMANDS:
            return None
        module, line = COMMANDS[cmd_name]
        if self._listing:
            return TyperCommand(name=cmd_name, help=line)
        command = typer.main.get_command(import_module(f"flows.command.{module}").app)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page without importing any command."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; an unknown name is answered with the nearest one."""
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment] # the names that suggestions are made from
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Decides which examples are worth training on, how training fits, when it stops paying and what may be "
    "promoted, as one budget.",
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Hold the options that stand before the subcommand."""
    if debug:
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "INFO")


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit with its code: 0 done, 2 refused, 3 may be tried again, 130 interrupted, 143 ended."""
    arguments = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, interrupted)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # `nohup` has it ignored
        signal.signal(signal.SIGHUP, terminated)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a log file is read while it grows
    try:
        refuse_foreign_rooms()
        app(arguments)
    except LazyTrainError as error:
        if "--debug" in arguments:
            raise
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
            sys.stderr.write(ENDED)
        raise
    except BaseException as error:
        from stages.ending import ended_by

        code = ended_by(error)
        if code is None:
            raise
        sys.stderr.write(ENDED)
        sys.exit(code)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C.

    Not the plain class: once that was raised inside text that a library runs by `exec` (as dataclasses do), CPython
    ends the process by the signal, whatever exit code was chosen since.
    """


def interrupted(number: int, frame: Any) -> None:
    """End by an exception that every handler of ctrl-C knows."""
    raise Interrupted


def terminated(number: int, frame: Any) -> None:
    """End by an exception, so that children (Prefect's embedded server) end with this process."""
    sys.exit(EXIT_TERMINATED)


if __name__ == "__main__":
    main()
