"""The family of tasks, and what a task is given: the holdout's items and a model on the bench.

A task turns items into one outcome each. An item that a task does not apply to gives no outcome, or one without a score
and with a note; never a zero. Loading models, batching, counting and writing belong to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from pydantic import Field

from data_contracts.method import Method

if TYPE_CHECKING:
    from stages.model.batch import Row
    from stages.model.tokenise import Renderer


@dataclass(frozen=True)
class Item:
    """One holdout example with its tokens.

    Args:
        item_id: its example_id, which is bound to its content.
        source: the group it belongs to.
        row: token ids and answer mask.
        messages, tools: the chat; empty for plain text.
        extra: the fields that the format did not use, such as `choices`.
        truncated: whether tokens were cut off.
    """

    item_id: str
    source: str
    row: Row
    messages: Sequence[dict[str, Any]]
    tools: Sequence[Any]
    extra: dict[str, Any]
    truncated: bool

    @cached_property
    def answer(self) -> str | None:
        """The last assistant turn's text; None where the example is plain text or its answer is no text."""
        turns = [turn.get("content") for turn in self.messages if turn.get("role") == "assistant"]
        return turns[-1] if turns and isinstance(turns[-1], str) else None

    @cached_property
    def prompt_ids(self) -> list[int]:
        """The tokens before the last supervised turn."""
        supervised = np.flatnonzero(self.row.answer_mask)
        last = int(supervised[-1])
        gaps = np.flatnonzero(~np.asarray(self.row.answer_mask[: last + 1], bool))
        return [int(token) for token in self.row.input_ids[: int(gaps[-1]) + 1 if len(gaps) else 0]]

    @classmethod
    def read(cls, example: dict[str, Any], row: Row, truncated: bool) -> Item:
        """Build an item from a row of an `examples` table and its tokens."""
        return cls(
            example["example_id"],
            example["source"],
            row,
            json.loads(example["messages"]) if example["messages"] else [],
            json.loads(example["tools"]) if example["tools"] else [],
            json.loads(example["extra"]) if example["extra"] else {},
            truncated,
        )


@dataclass(frozen=True)
class Outcome:
    """What one model did on one item: a row of the `evaluation` table (see there) without suite, model and source."""

    item_id: str
    score: float | None = None
    loss_sum: float | None = None
    answer_tokens: int = 0
    prediction: str = ""
    extracted: str | None = None
    log_likelihoods: tuple[float, ...] = ()
    note: str = ""


class Bench(Protocol):
    """A model ready to be asked; counts what it is asked."""

    tokenizer: Any
    longest: int
    """Positions the model was made for."""

    @property
    def renderer(self) -> Renderer:
        """Turns messages into token ids and an answer mask for this model."""

    def losses(self, rows: Sequence[Row]) -> list[tuple[float, int]]:
        """Return (nats over the answer tokens, answer tokens) of each row, in the order given."""

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: frozenset[int]
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt, in the order given."""


class Task(Method):
    """One way of asking a model about items."""

    family: ClassVar[str] = "tasks"
    home: ClassVar[str] = "stages.evaluate.tasks"

    suite: str | None = Field(None, min_length=1, description="Name in the evaluation; unset is the method's name.")

    @property
    def suite_name(self) -> str:
        """The name under which outcomes are written."""
        return self.suite or self.name()

    def outcomes(self, bench: Bench, items: Sequence[Item]) -> Iterator[Outcome]:
        """Yield at most one outcome an item, in any order. `items` is one block of the holdout."""
        raise TypeError(f"{type(self).__name__} defines no outcomes")
