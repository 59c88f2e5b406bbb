"""Normal forms of text, and the id of an example, made from its content alone.

Two forms, for two questions. `stored_form` asks "is this the same example?": canonical composition and line ends only,
so code and case keep their meaning. `match_form` asks "would it give the answer away?": case, spacing and
compatibility characters fold too. Neither changes what is stored: an example keeps its text character for character.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

ID_BYTES = 16
Message = Mapping[str, Any]
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def stored_form(text: str) -> str:
    """Return `text` in NFC with line ends as "\\n" and no space around it."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.strip()


def match_form(text: str) -> str:
    """Return `text` in NFKC, case-folded, each run of white space one space, none around it."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    else:
        text = text.lower()
    return " ".join(text.split())


def words(text: str) -> list[str]:
    """Return the words of `text` in match form; scripts written without spaces give one word a run."""
    return match_form(text).split()


def _digest(value: Any) -> bytes:
    return hashlib.sha256(_ENCODER.encode(value).encode()).digest()[:ID_BYTES]


def _form(value: Any, form: Any) -> Any:
    if isinstance(value, str):
        return form(value)
    if isinstance(value, Mapping):
        return {key: _form(item, form) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_form(item, form) for item in value]
    return value


def example_id(messages: Sequence[Message], tools: Sequence[Any], text: str, copy: int = 0) -> str:
    """Return the 32 hex digits of an example: a 128-bit hash of its turns and tools, or of its plain text.

    Args:
        messages: the turns, with every key that changes what is trained on; empty for plain text.
        tools: the tool schemas; empty where there are none.
        text: plain text; "" for chats.
        copy: 0, or how many equal examples came before where duplicates are kept.

    Raises `UnicodeEncodeError` for text with an unpaired surrogate: it has no bytes.
    """
    content: dict[str, Any] = {"messages": _form(messages, stored_form)} if messages else {"text": stored_form(text)}
    if tools:
        content["tools"] = _form(tools, stored_form)
    if copy:
        content["copy"] = copy
    return _digest(content).hex()


def match_digest(*parts: str) -> bytes:
    """Return 16 bytes that are equal for texts whose match forms are equal, part by part."""
    return _digest([match_form(part) for part in parts])
