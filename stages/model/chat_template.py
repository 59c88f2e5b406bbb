"""A chat as the model's own template writes it, with the characters that are answers.

Where the template marks them (`{% generation %}`) its marks are taken; else each answer is the difference between the
chat up to its turn and the chat before it, and the whole must begin with both, turn by turn, or the row is refused.
Nothing is lost unseen: a system turn, a question, a tool or a tool's result that the template drops refuses the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from stages.text.refusal import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, Any]
Span = tuple[int, int]
DATE = "26 Jul 2024"
_SENTINEL = "Sentinel7Q4"
_TEMPLATE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def supervised_turns(messages: Sequence[Message], supervise: str) -> list[int]:
    """Return the indices of the turns to train on: assistant turns, all or the last; a turn's `train` flag wins."""
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = assistant if supervise == "all" else assistant[-1:]
    return [i for i in assistant if messages[i].get("train", i in chosen)]


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """Put each system turn's text in front of the next user turn, a blank line between; `Refused` without one."""
    folded: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            folded.append({**message, "content": "\n\n".join([*waiting, message["content"]])})
            waiting = []
        else:
            folded.append(message)
    if waiting:
        raise Refused("system_role", "no user turn follows the system turn to fold it into", "messages")
    return folded


class ChatTemplate:
    """The template of one tokenizer.

    Args:
        tokenizer: one with a chat template.

    A template that prints today's date would make token ids depend on the day: it is given the fixed date `DATE`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        source = tokenizer.get_chat_template()
        self.marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._settings: dict[str, Any] = {"date_string": DATE} if "strftime_now" in source else {}
        self._ends = tuple(sorted(tokenizer.added_tokens_encoder))
        self._keeps_system: bool | None = None

    @property
    def keeps_system(self) -> bool:
        """Whether a system turn is neither refused nor dropped."""
        if self._keeps_system is None:
            turns = [{"role": "system", "content": _SENTINEL}, {"role": "user", "content": "Hi"}]
            try:
                self._keeps_system = _SENTINEL in self.write(turns)
            except Refused:
                self._keeps_system = False
        return self._keeps_system

    def write(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, prompt: bool = False) -> str:
        """Return the chat as text; with `prompt`, up to where the assistant would speak. Raises `Refused`."""
        try:
            text = self.tokenizer.apply_chat_template(
                _plain(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._settings,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise Refused(
                "template_refused", f"the model's chat template refuses this chat: {error}", "messages"
            ) from error
        return str(text)

    def marked(
        self, messages: Sequence[Message], tools: Sequence[Any], turns: Sequence[int]
    ) -> tuple[list[int], list[bool]]:
        """Return (ids, answer mask) from the template's own marks, keeping those of `turns`. Raises `Refused`."""
        self.write(messages, tools)  # raises what the template refuses
        made: Any = self.tokenizer.apply_chat_template(
            _plain(messages),
            tools=list(tools) or None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._settings,
        )
        ids, mask = list(made["input_ids"]), [bool(bit) for bit in made["assistant_masks"]]
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if list(turns) == assistant:
            return ids, mask
        starts = [i for i, bit in enumerate(mask) if bit and (i == 0 or not mask[i - 1])]
        if len(starts) != len(assistant):
            detail = (
                f"the template marks {len(starts)} answers in a chat of {len(assistant)}: turns cannot be told apart"
            )
            raise Refused("mask_unverified", detail, "messages")
        number = -1
        for i, bit in enumerate(mask):
            number += i in set(starts)
            mask[i] = bit and assistant[number] in turns
        return ids, mask

    def spans(self, text: str, messages: Sequence[Message], tools: Sequence[Any], turns: Sequence[int]) -> list[Span]:
        """Return the character spans of the answers of `turns` in `text`, the whole chat. Raises `Refused`."""
        return [self._span(text, messages, tools, turn) for turn in turns]

    def _span(self, text: str, messages: Sequence[Message], tools: Sequence[Any], turn: int) -> Span:
        upto = text if turn == len(messages) - 1 else self.write(messages[: turn + 1], tools)
        start = self._start(upto, messages, tools, turn)
        if start is None or not text.startswith(upto):
            detail = f"turn {turn} cannot be located: the template writes it differently when more turns follow"
            raise Refused("mask_unverified", detail, f"messages[{turn}]")
        span = text[start : len(upto)]
        bare = span.rstrip()
        if bare.endswith(self._ends):  # white space after the end-of-turn token is the template's
            span = bare
        if not _holds(span, messages[turn]):
            detail = f"the template does not write the answer of turn {turn} as it stands"
            raise Refused("mask_unverified", detail, f"messages[{turn}].content")
        return start, start + len(span)

    def _start(self, upto: str, messages: Sequence[Message], tools: Sequence[Any], turn: int) -> int | None:
        """Return where the answer begins in `upto`: after the generation prompt, else after the role's header."""
        earlier = messages[:turn]
        if earlier:
            try:
                prompt = self.write(earlier, tools, prompt=True)
                if upto.startswith(prompt) and prompt != self.write(earlier, tools):
                    return len(prompt)
            except Refused:
                pass  # some templates refuse a chat that stops here; the header below needs no such chat
        probe = self.write([*earlier, {"role": "assistant", "content": _SENTINEL}], tools)
        start = probe.find(_SENTINEL)
        return start if start >= 0 and upto.startswith(probe[:start]) else None

    def verify_kept(self, text: str, messages: Sequence[Message], tools: Sequence[Any]) -> None:
        """Raise `Refused` where the template left out a question, a system turn, a tool's result or a tool."""
        for i, message in enumerate(messages):
            content = (message.get("content") or "").strip()
            if message["role"] != "assistant" and not any(form in text for form in _forms(content)):
                detail = f"the template leaves out the {message['role']} turn {i}"
                raise Refused("template_drops_turn", detail, f"messages[{i}].content")
        for i, tool in enumerate(tools):
            name = tool.get("function", tool).get("name", "")
            if name not in text:
                detail = f"the template leaves out the tool {name!r}: take a model whose template knows tools"
                raise Refused("template_drops_tools", detail, f"tools[{i}]")


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the turns as a template sees them: its own keys only, null content as empty text."""
    return [
        {key: message[key] for key in _TEMPLATE_KEYS if message.get(key) is not None}
        | {"content": message.get("content") or ""}
        for message in messages
    ]


def _forms(content: str) -> Iterator[str]:
    """Yield a text as it is, and as templates write it inside JSON."""
    yield content
    yield json.dumps(content)[1:-1]
    yield json.dumps(content, ensure_ascii=False)[1:-1]


def _holds(span: str, message: Message) -> bool:
    content = (message.get("content") or "").strip()
    named = (call["function"]["name"] for call in message.get("tool_calls") or ())
    return bool(span.strip()) and content in span and all(name in span for name in named)
