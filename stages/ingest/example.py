"""A row in normal form: what the formats make, before any tokenizer."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.text.refusal import Refused


@dataclass
class Example:
    """A row in normal form: turns and tools, or text."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    text: str = ""
    answer_start: int = 0
    """Of plain text: the character at which what is supervised begins."""
    extra: dict[str, Any] = field(default_factory=dict)
    row_id: str = ""
    source: str = ""
    task: str = ""
    mended: list[str] = field(default_factory=list)

    def question(self) -> str:
        """Return all that comes before the last answer, one turn below another; "" for plain text."""
        return "\n".join(message["content"] or "" for message in self.messages[:-1])

    def answer(self) -> str:
        """Return the last answer with its tool calls; the text of plain text."""
        if not self.messages:
            return self.text
        last = self.messages[-1]
        calls = json.dumps(last["tool_calls"], ensure_ascii=False, sort_keys=True) if "tool_calls" in last else ""
        return (last["content"] or "") + calls


def check_nul(example: Example) -> None:
    """Raise `Refused` where a text that would be trained on holds NUL."""
    for i, message in enumerate(example.messages):
        if "\0" in (message["content"] or ""):
            raise Refused("nul_byte", "the text holds a NUL character", f"messages[{i}].content")
    if "\0" in example.text:
        raise Refused("nul_byte", "the text holds a NUL character", "text")


def plain_json(value: Any) -> Any:
    """Return a value as JSON can hold it: dates as ISO text, NaN as null, bytes as hex, other objects as their text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    return str(value)
