"""From a row as it stands in a file to an example: which format it has, and what of it is used.

Each row is looked at by itself, so one file may mix formats. Prompt/completion, Alpaca, messages, ShareGPT and plain
text are read; rows made for preference training are recognised and refused by name. An Alpaca row's question is its
instruction, then a blank line, then its input where there is one. What a format does not use goes to `extra` as JSON
and never decides whether a row is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from data_contracts.config import IngestConfig
from data_contracts.errors import ConfigError
from data_contracts.method import nearest
from stages.ingest.example import Example, check_nul, plain_json
from stages.ingest.turns import ROLES, Turns, kind, parsed
from stages.text.refusal import Refused

NAMES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversation"),
    "conversations": ("conversations",),
    "instruction": ("instruction",),
    "input": ("input",),
    "output": ("output", "response", "completion", "answer"),
    "prompt": ("prompt", "question", "query", "input"),
    "completion": ("completion", "response", "answer", "output", "target"),
    "text": ("text",),
    "system": ("system", "system_prompt"),
    "history": ("history",),
    "tools": ("tools", "functions"),
    "id": ("id",),
}
"""Our field names and the names that files use for them, tried in order; `ingest.fields` goes before."""


class Formats:
    """Reads rows by the configuration. Raises `ConfigError` for a field or role that it does not know."""

    def __init__(self, settings: IngestConfig) -> None:
        self.settings = settings
        unknown = [name for name in settings.fields if name not in NAMES]
        if unknown:
            raise ConfigError(
                "`ingest.fields` maps our field names", f"{unknown[0]!r} is none", nearest(unknown[0], sorted(NAMES))
            )
        bad = [role for role in settings.roles.values() if role not in ROLES]
        if bad:
            raise ConfigError("`ingest.roles` maps to our roles", f"{bad[0]!r} is none", nearest(bad[0], list(ROLES)))
        self.turns = Turns(settings.roles, settings.same_role_twice)
        self.names = {ours: _several(settings.fields.get(ours), names) for ours, names in NAMES.items()}
        self._readers: dict[str, Callable[[Mapping[str, Any], Example], set[str]]] = {
            "messages": lambda row, out: self._chat(row, out, "messages"),
            "sharegpt": lambda row, out: self._chat(row, out, "conversations"),
            "alpaca": self._alpaca,
            "prompt": self._prompt,
            "text": self._text,
        }

    def read(self, row: Mapping[str, Any]) -> Example:
        """Return the example that a row holds. Raises `Refused`."""
        example = Example(row_id=self.row_id(row))
        settings = self.settings
        used = self._readers[self.detect(row) if settings.format == "auto" else settings.format](row, example)
        self._read_tools(row, example, used)
        if settings.task_field is not None:
            task = row.get(settings.task_field)
            if task is None or task == "":
                raise Refused("no_task", "the row names no task, so it could stand on both sides", settings.task_field)
            example.task = task if isinstance(task, str) else json.dumps(task, sort_keys=True, default=str)
        if settings.source_field is not None and row.get(settings.source_field) is not None:
            source = row[settings.source_field]
            example.source = source if isinstance(source, str) else json.dumps(source, sort_keys=True, default=str)
        example.extra |= {key: plain_json(value) for key, value in row.items() if key not in used}
        check_nul(example)
        return example

    def row_id(self, row: Mapping[str, Any]) -> str:
        """Return the id that the user gave the row, "" for none; only to speak of it."""
        value = row.get(self._name(row, "id") or "")
        return value[:80] if isinstance(value, str) else "" if value is None else str(value)[:80]

    def detect(self, row: Mapping[str, Any]) -> str:
        """Return the row's format; a field that is null counts only where no other format fits. Raises `Refused`."""
        if "chosen" in row and "rejected" in row:
            detail = "a preference row (chosen and rejected): it says which answer is better, not what to answer"
            raise Refused("preference", f"{detail}; keep the chosen answer as `completion` to train on it", "chosen")
        if isinstance(row.get("label"), bool) and "completion" in row:
            detail = "a preference row (completion with a label): a completion labelled false is not to be learnt"
            raise Refused("preference", f"{detail}; drop those, and the field `label`", "label")
        present = {key: value for key, value in row.items() if value is not None}
        for given in (present, row):
            for name, needs in (
                ("messages", ("messages",)),
                ("sharegpt", ("conversations",)),
                ("alpaca", ("instruction", "output")),
                ("prompt", ("prompt", "completion")),
                ("text", ("text",)),
            ):
                if all(self._name(given, ours) for ours in needs):
                    return name
        keys = ", ".join(sorted(map(str, row))[:12]) or "none"
        raise Refused("unknown_format", f"no known format has these fields: {keys}; map them with ingest.fields", "")

    def _name(self, row: Mapping[str, Any], ours: str) -> str | None:
        return next((name for name in self.names[ours] if name in row), None)

    def _take(self, row: Mapping[str, Any], ours: str, used: set[str], *, needed: bool = True) -> tuple[Any, str]:
        """Return (value, the file's field name) of our field, marked used; `Refused` where needed and absent."""
        name = self._name(row, ours)
        if name is None:
            if needed:
                names = " or ".join(self.names[ours])
                raise Refused(
                    "missing_field", f"the row has no {names}: map it with ingest.fields", self.names[ours][0]
                )
            return None, ours
        used.add(name)
        return row[name], name

    def _words(self, row: Mapping[str, Any], ours: str, used: set[str], *, needed: bool = True) -> tuple[str, str]:
        value, name = self._take(row, ours, used, needed=needed)
        if value is None:
            return "", name
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise Refused("not_text", f"the value is {kind(value)}, not text", name)
        return value if isinstance(value, str) else json.dumps(value), name

    def _chat(self, row: Mapping[str, Any], out: Example, ours: str) -> set[str]:
        used: set[str] = set()
        value, name = self._take(row, ours, used)
        out.messages, out.mended, unused = self.turns.read(value, name)
        out.extra |= {key: plain_json(left) for key, left in unused.items()}
        self._add_system(row, out, used)
        return used

    def _add_system(self, row: Mapping[str, Any], out: Example, used: set[str]) -> None:
        system, name = self._words(row, "system", used, needed=False)
        if not system.strip():
            return
        if out.messages[0]["role"] == "system":
            used.discard(name)
            return
        out.messages.insert(0, {"role": "system", "content": system})

    def _pair(self, out: Example, question: str, names: tuple[str, str], answer: str) -> None:
        if not question.strip():
            raise Refused("empty_turn", "the question is empty", names[0])
        if not answer.strip():
            raise Refused("empty_answer", f"empty answer: {'blank' if answer else 'empty'} or null", names[1])
        out.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def _alpaca(self, row: Mapping[str, Any], out: Example) -> set[str]:
        used: set[str] = set()
        instruction, name = self._words(row, "instruction", used)
        given, _ = self._words(row, "input", used, needed=False)
        answer, answer_name = self._words(row, "output", used)
        history, history_name = self._take(row, "history", used, needed=False)
        for i, pair in enumerate(history or ()):
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
                raise Refused("bad_messages", "history is a list of [question, answer]", f"{history_name}[{i}]")
            self._pair(out, pair[0], (f"{history_name}[{i}]",) * 2, pair[1])
        question = f"{instruction}\n\n{given}" if given.strip() else instruction
        self._pair(out, question, (name, answer_name), answer)
        self._add_system(row, out, used)
        return used

    def _prompt(self, row: Mapping[str, Any], out: Example) -> set[str]:
        used: set[str] = set()
        prompt, name = self._take(row, "prompt", used)
        completion, answer_name = self._take(row, "completion", used)
        if isinstance(prompt, list) and isinstance(completion, list):  # turns on both sides: only the second is learnt
            before = [{**turn, "train": False} if _speaks(turn) else turn for turn in prompt]
            out.messages, out.mended, unused = self.turns.read(before + completion, name)
            out.extra |= {key: plain_json(left) for key, left in unused.items()}
        else:
            question, _ = self._words(row, "prompt", used)
            answer, _ = self._words(row, "completion", used)
            self._pair(out, question, (name, answer_name), answer)
        self._add_system(row, out, used)
        return used

    def _text(self, row: Mapping[str, Any], out: Example) -> set[str]:
        used: set[str] = set()
        out.text, name = self._words(row, "text", used)
        if not out.text.strip():
            raise Refused("empty_answer", "the text is empty", name)
        mark = self.settings.response_template
        if mark is not None:
            at = out.text.rfind(mark)
            if at < 0:
                raise Refused("no_response_template", f"the text does not hold the response template {mark!r}", name)
            out.answer_start = at + len(mark)
            if not out.text[out.answer_start :].strip():
                raise Refused("empty_answer", f"empty answer: nothing follows the response template {mark!r}", name)
        return used

    def _read_tools(self, row: Mapping[str, Any], out: Example, used: set[str]) -> None:
        value, name = self._take(row, "tools", set(), needed=False)
        if not out.messages or value is None or value in ("", []):
            return
        used.add(name)
        tools = parsed(value, name) if isinstance(value, str) else value
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise Refused("bad_tools", f"the value is {kind(tools)}, not a list of tool schemas", name)
        out.tools = [plain_json(tool) for tool in tools]


def _several(given: str | None, names: tuple[str, ...]) -> tuple[str, ...]:
    return names if given is None else (given, *(name for name in names if name != given))


def _speaks(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role", turn.get("from")) in ("assistant", "gpt", "model")
