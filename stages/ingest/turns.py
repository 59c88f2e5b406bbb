"""The turns of a chat, checked and brought to one form: roles by our names, content as text, calls as objects.

Policies, each reported per row where it acts: two turns in a row of one role are merged with a blank line between (or
refused); turns after the last answer are dropped, since nothing is learnt from them. Assistant turns with tool calls
and tool results are never merged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stages.text.refusal import Refused

ROLES = ("system", "user", "assistant", "tool")
KNOWN_NAMES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
_KEPT = ("name", "tool_call_id", "reasoning_content")
_USED = {"role", "from", "content", "value", "tool_calls", "train", "weight", *_KEPT}


class Turns:
    """Reads the list of turns of one row; `mended` says what a policy changed, `unused` holds the keys it left.

    Args:
        roles: the configured map of speaker names to our roles, over `KNOWN_NAMES`.
        same_role_twice: "merge" or "refuse".
    """

    def __init__(self, roles: Mapping[str, str], same_role_twice: str) -> None:
        self.names = {**KNOWN_NAMES, **roles}
        self.same_role_twice = same_role_twice

    def read(self, value: Any, field: str) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
        """Return (turns, what was mended, unused keys) of the list in `field`. Raises `Refused`."""
        if isinstance(value, str):
            value = parsed(value, field)
        if value is None:
            raise Refused("no_messages", "the value is null, not a list of turns", field)
        if not isinstance(value, list):
            raise Refused("bad_messages", f"the value is {kind(value)}, not a list of turns", field)
        if not value:
            raise Refused("no_messages", "the list of turns is empty", field)
        unused: dict[str, Any] = {}
        turns = [self._turn(item, f"{field}[{i}]", unused) for i, item in enumerate(value)]
        return *self._policies(turns, field), unused

    def _turn(self, item: Any, field: str, unused: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(item, dict):
            raise Refused("bad_messages", f"the turn is {kind(item)}, not an object", field)
        role_key = "from" if "from" in item and "role" not in item else "role"
        name = item.get(role_key)
        role = self.names.get(name) if isinstance(name, str) else None
        if role is None:
            known = ", ".join(sorted(self.names))
            remedy = f"known roles: {known}; map a new one with ingest.roles: {{{name}: user}}"
            raise Refused("unknown_role", f"value {name!r} is no known role; {remedy}", f"{field}.{role_key}")
        content_key = "content" if "content" in item else "value"
        turn: dict[str, Any] = {"role": role, "content": _content(item.get(content_key), f"{field}.{content_key}")}
        turn |= {key: item[key] for key in _KEPT if isinstance(item.get(key), str)}
        calls = item.get("tool_calls")
        if name == "function_call":
            calls, turn["content"] = [parsed(turn["content"] or "", f"{field}.{content_key}")], None
        if calls:
            turn["tool_calls"] = _calls(calls, f"{field}.tool_calls", role)
        flag = item.get("train", item.get("weight"))
        if flag is not None:
            if flag not in (0, 1) or (role != "assistant" and flag):
                raise Refused("bad_flag", f"value {flag!r}: train and weight are true or false, on answers", field)
            if role == "assistant":
                turn["train"] = bool(flag)
        unused |= {f"{field}.{key}": left for key, left in item.items() if key not in _USED and left is not None}
        self._check_content(turn, f"{field}.{content_key}")
        return turn

    @staticmethod
    def _check_content(turn: dict[str, Any], field: str) -> None:
        blank = not (turn["content"] or "").strip()
        if turn["role"] == "tool":
            turn["content"] = turn["content"] or ""
        elif blank and turn["role"] == "assistant" and not turn.get("tool_calls"):
            how = "null" if turn["content"] is None else "empty" if turn["content"] == "" else "blank"
            raise Refused("empty_answer", f"empty answer: the assistant's content is {how}", field)
        elif blank and turn["role"] != "assistant":
            raise Refused("empty_turn", f"the {turn['role']}'s content is empty", field)

    def _policies(self, turns: list[dict[str, Any]], field: str) -> tuple[list[dict[str, Any]], list[str]]:
        mended: list[str] = []
        last = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=-1)
        if last < 0:
            raise Refused("no_answer", "no assistant turn: there is nothing to train on", field)
        kept: list[dict[str, Any]] = []
        for i, turn in enumerate(turns):
            if i and turn["role"] == turns[i - 1]["role"] and turn["role"] != "tool":
                if self.same_role_twice == "refuse":
                    detail = f"turn {i} is a second {turn['role']} turn in a row: set ingest.same_role_twice to merge"
                    raise Refused("same_role_twice", detail, f"{field}[{i}]")
                if _mergeable(kept[-1], turn):
                    kept[-1] = {**kept[-1], "content": f"{kept[-1]['content']}\n\n{turn['content']}"}
                    mended.append(f"turn {i} is a second {turn['role']} turn in a row: merged with the one before")
                    continue
            kept.append(turn)
        tail = len(kept) - 1 - max(i for i, turn in enumerate(kept) if turn["role"] == "assistant")
        if tail:
            kept = kept[:-tail]
            mended.append(f"the chat ends without an answer: turns from {last + 1} on dropped")
        return kept, mended


def _mergeable(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return set(a) | set(b) <= {"role", "content", "train"} and a.get("train") == b.get("train")


def kind(value: Any) -> str:
    """Return what a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def parsed(text: str, field: str) -> Any:
    """Return the JSON that stands in a text field. Raises `Refused`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("bad_messages", f"the text is not JSON: {error}", field) from error


def _content(value: Any, field: str) -> str | None:
    """Return a turn's text: a text, null, or a list of text parts put together."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = []
        for i, part in enumerate(value):
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                named = part.get("type") if isinstance(part, dict) else kind(part)
                raise Refused("not_text", f"a part of kind {named!r}: only text is trained on", f"{field}[{i}]")
            texts.append(text)
        return "".join(texts)
    raise Refused("not_text", f"the content is {kind(value)}, not text", field)


def _calls(value: Any, field: str, role: str) -> list[dict[str, Any]]:
    """Return tool calls as `{type, function: {name, arguments}}`, arguments as an object, other keys as they are."""
    if role != "assistant":
        raise Refused("bad_tool_call", f"a {role} turn cannot call tools", field)
    if isinstance(value, str):
        value = parsed(value, field)
    if not isinstance(value, list):
        raise Refused("bad_tool_call", f"the value is {kind(value)}, not a list of calls", field)
    calls = []
    for i, item in enumerate(value):
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise Refused("bad_tool_call", "a call is an object with the function's name", f"{field}[{i}]")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise Refused("bad_tool_call", f"arguments are not JSON: {error}", f"{field}[{i}].arguments") from error
        arguments = {} if arguments is None else arguments
        call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(item.get("id"), str):
            call["id"] = item["id"]
        calls.append(call)
    return calls
