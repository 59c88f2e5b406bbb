"""Every error a user can meet: what was promised, what was found, what to do.

A caller catches `LazyTrainError`; the class says whose fault it is and `exit_code` what a process should return.
Nothing else in the project raises on bad input, and nothing swallows one of these.
"""

from __future__ import annotations

EXIT_COMMITTED = 0
EXIT_REFUSED = 2
EXIT_RETRYABLE = 3
EXIT_TERMINATED = 143
EXIT_INTERRUPTED = 130


class LazyTrainError(Exception):
    """A refusal that names the promise, the finding and the remedy.

    Args:
        promised: what should have held, as a sentence part ("`pool` holds at least one usable row").
        found: what was there instead, with file, row and field where they are known.
        remedy: what the reader can do about it.
    """

    exit_code = EXIT_REFUSED

    def __init__(self, promised: str, found: str, remedy: str) -> None:
        super().__init__(promised, found, remedy)
        self.promised, self.found, self.remedy = promised, found, remedy

    def __str__(self) -> str:
        return f"{self.found}\n  expected: {self.promised}\n  remedy:   {self.remedy}"


class ConfigError(LazyTrainError):
    """The configuration names something unknown, out of range or contradictory."""


class InputError(LazyTrainError):
    """A user's file (data, model, predictions) cannot be used as it is."""


class MethodError(LazyTrainError):
    """A method name is unknown, or a method broke what its family promises."""


class ModelError(LazyTrainError):
    """A model or tokenizer is missing, gated, unsafe to load or does not fit the data."""


class BudgetError(LazyTrainError):
    """Nothing fits what is left of the budget."""


class DoesNotFitError(BudgetError):
    """No way of training fits the memory: every compatible one was priced.

    Args:
        needed_bytes: the smallest memory budget, headroom included, that one would fit.
        least: lowest predicted peak of each technique, by its place in the configured order.
    """

    def __init__(self, promised: str, found: str, remedy: str, *, needed_bytes: int, least: dict[int, int]) -> None:
        super().__init__(promised, found, remedy)
        self.needed_bytes, self.least = needed_bytes, least


class ContractError(LazyTrainError):
    """An artifact breaks its contract; `found` holds contract, column, rule and the first rows."""


class ArtifactError(LazyTrainError):
    """An artifact is missing, incomplete, altered since its commit, or belongs to another store."""


class CanonicalError(LazyTrainError):
    """A value that should enter an identity has no canonical form."""


class TransientError(LazyTrainError):
    """Something outside the work failed (a lock, a server, a lost worker): trying again may help."""

    exit_code = EXIT_RETRYABLE
