"""The text of an example, found in the mapped `examples` table by its id.

For reports and for scorers that read text; an id that is not in the table has no text, which is not an error here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pyarrow as pa

from stages.text.normalise import match_form

WORD = re.compile(r"\w+")


def text_of(examples: pa.Table, example_id: str) -> str:
    """Return an example's text: the turns of a chat one a line, or the plain text; "" where the id is not there."""
    low, high, ids = 0, examples.num_rows, examples.column("example_id")
    while low < high:
        middle = (low + high) // 2
        if ids[middle].as_py() < example_id:
            low = middle + 1
        else:
            high = middle
    if low == examples.num_rows or ids[low].as_py() != example_id:
        return ""
    return _text(examples.column("messages")[low].as_py(), examples.column("text")[low].as_py())


def texts_of(examples: pa.Table) -> Iterator[str]:
    """Yield the text of every example in the table's order, one record batch in memory."""
    for batch in examples.select(["messages", "text"]).to_batches():
        for messages, text in zip(batch.column(0), batch.column(1), strict=True):
            yield _text(messages.as_py(), text.as_py())


def terms_of(text: str) -> list[str]:
    """Return the words of a text in match form, punctuation left out; scripts without spaces give runs."""
    return WORD.findall(match_form(text))


def _text(messages: str, text: str) -> str:
    if not messages:
        return text
    turns = [turn for turn in json.loads(messages) if isinstance(turn, dict)]
    return "\n".join(f"{turn.get('role', '')}: {turn.get('content') or ''}" for turn in turns)


def beginning(text: str, characters: int = 90) -> str:
    """Return the beginning of a text on one line; the middle is left out so that an answer still shows."""
    line = " ".join(text.split())
    half = characters // 2
    return line if len(line) <= characters else f"{line[:half]} … {line[-half:]}"
