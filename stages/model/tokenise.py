"""From messages or plain text to token ids and an answer mask, by the model's own tokenizer.

A chat goes through the tokenizer's chat template. A base model has none; its plain form is: the turns before an answer
one below another, a line break, the answer, the end-of-text token; then the next turns. Only answers are supervised;
of plain text, everything but the first token. Needs a fast tokenizer (offsets) and no torch of its own.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stages.model.chat_template import ChatTemplate, Span, fold_system, supervised_turns
from stages.text.refusal import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, Any]

PAST_EMBEDDING = "token_past_embedding"


class Rendered(NamedTuple):
    """One example for one tokenizer: ids_T, answer_mask_T (True where supervised; never at 0), and the text of it."""

    ids: list[int]
    answer_mask: list[bool]
    text: str


class Renderer:
    """Writes and tokenises examples.

    Args:
        tokenizer: a fast tokenizer.
        supervise: "all" assistant turns or the "last"; a turn's `train` flag wins over it.
        system_role: "fold" a system turn into the next user turn where the template refuses or drops it, or "refuse".
        vocabulary: rows of the model's embedding; a token past it refuses the row. None: not checked.

    `folded` counts the rows whose system turn was folded; `control_rows` those with a turn whose text holds a control
    token's text (`control_token` is the first seen), which the tokenizer then reads as one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        supervise: str = "all",
        system_role: str = "fold",
        vocabulary: int | None = None,
    ) -> None:
        self.tokenizer, self.supervise, self.system_role = tokenizer, supervise, system_role
        self.vocabulary = vocabulary
        self.template = ChatTemplate(tokenizer) if tokenizer.chat_template else None
        self.folded = 0
        self.control_rows, self.control_token = 0, ""
        special = sorted(set(tokenizer.all_special_tokens), key=lambda token: (-len(token), token))
        self._control = re.compile("|".join(map(re.escape, special)) or "(?!)")
        tokenizer.backend_tokenizer.no_truncation()  # a tokenizer.json may ask for either
        tokenizer.backend_tokenizer.no_padding()
        self._first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        if self._first and tokenizer("a").input_ids[:1] != self._first:
            self._first = []  # it has the token but does not begin texts with it

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Rendered:
        """Return a chat's ids and answer mask. Raises `Refused` with the reason where it cannot be masked rightly."""
        turns = supervised_turns(messages, self.supervise)
        if not turns:
            raise Refused("no_answer", "no assistant turn is to be trained on: every `train` flag is false", "messages")
        self._note_control_tokens(messages)
        if self.template is None:
            return self._checked(*self._plain(messages, tools, set(turns)))
        chat, turns = self._for_template(messages)
        text = self.template.write(chat, tools)
        self.template.verify_kept(text, chat, tools)
        if self.template.marks_answers:
            ids, mask = self.template.marked(chat, tools, turns)
        else:
            ids, mask = self._encode(text, self.template.spans(text, chat, tools, turns))
        return self._checked(ids, mask, text)

    def render_text(self, text: str, answer_start: int = 0) -> Rendered:
        """Return plain text's ids and mask: supervised from character `answer_start` on, never the first token."""
        ids, mask = self._encode(text, [(answer_start, len(text))])
        ids, mask = self._first + ids + self._end, [False] * len(self._first) + mask + [True] * len(self._end)
        return self._checked(ids, mask, text)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Return the ids of a chat up to where the assistant speaks, for generation. Raises `Refused`."""
        if self.template is None:
            ids, waiting = list(self._first), ""
            for message in messages:
                waiting += message["content"] or ""
                if message["role"] == "assistant":
                    ids += self._encode(waiting, [])[0] + self._end
                    waiting = ""
                else:
                    waiting += "\n"
            return ids + self._encode(waiting, [])[0]
        chat, _ = self._for_template(messages)
        return self._encode(self.template.write(chat, tools, prompt=True), [])[0]

    @property
    def _end(self) -> list[int]:
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    def _note_control_tokens(self, messages: Sequence[Message]) -> None:
        found = next(filter(None, (self._control.search(message.get("content") or "") for message in messages)), None)
        if found is not None:
            self.control_rows += 1
            self.control_token = self.control_token or found[0]

    def _for_template(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[int]]:
        """Return the chat that the template will take, and its supervised turns."""
        assert self.template is not None
        system = [i for i, message in enumerate(messages) if message["role"] == "system"]
        if system and not self.template.keeps_system:
            if self.system_role == "refuse":
                detail = "the model's chat template takes no system turn: set ingest.system_role to fold"
                raise Refused("system_role", f"value 'system': {detail}", f"messages[{system[0]}].role")
            messages = fold_system(messages)
            self.folded += 1
        return messages, supervised_turns(messages, self.supervise)

    def _encode(self, text: str, spans: Iterable[Span]) -> tuple[list[int], list[bool]]:
        """Tokenise `text`; a token is supervised where all its characters lie in a span."""
        made = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        ids, places = made.ids, made.offsets
        mask = [False] * len(ids)
        starts = [low for low, _ in places]
        for start, end in spans:
            for i in range(bisect_left(starts, start), len(ids)):
                low, high = places[i]
                if high > end:
                    break
                mask[i] = low < high
        return ids, mask

    def _plain(
        self, messages: Sequence[Message], tools: Sequence[Any], turns: set[int]
    ) -> tuple[list[int], list[bool], str]:
        """Write a chat for a base model: turns as lines, the end-of-text token after each answer."""
        if tools or any(message.get("tool_calls") for message in messages):
            raise Refused("no_template", "a chat with tools needs a model with a chat template", "tools")
        ids, mask, parts = list(self._first), [False] * len(self._first), list[str]()
        waiting = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                waiting += message["content"] + "\n"
                continue
            text = waiting + message["content"]
            spans = [(len(waiting), len(text))] if i in turns else []
            piece, piece_mask = self._encode(text, spans)
            ids += piece + self._end
            mask += piece_mask + [i in turns] * len(self._end)
            parts.append(text + (self.tokenizer.eos_token or ""))
            waiting = ""
        return ids, mask, "".join(parts)

    def _checked(self, ids: list[int], mask: list[bool], text: str) -> Rendered:
        if mask:
            mask[0] = False  # nothing comes before it to predict it from
        if not any(mask):
            raise Refused("no_answer", "no token of the answer can be supervised", "")
        if self.vocabulary is not None and max(ids) >= self.vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            rows = f"the embedding has {self.vocabulary} rows (0..{self.vocabulary - 1})"
            detail = f"token {token!r} has id {max(ids)} but {rows}"
            raise Refused(PAST_EMBEDDING, f"{detail}: set ingest.resize_embeddings to grow it", "")
        return Rendered(ids, mask, text)


def truncate(rendered: Rendered, limit: int, how: str) -> tuple[list[int], list[bool], bool]:
    """Return (ids, answer mask, whether cut) of at most `limit` tokens, at least one of them supervised.

    Args:
        rendered: the whole example.
        limit: most tokens, at least 2.
        how: "answer_end" cuts the end; "prompt_start" cuts the prompt after its first token (which begins texts) as
            far as needed, then the end; "quarantine" refuses what is longer.

    Raises `Refused` where no answer token would be left.
    """
    ids, mask = rendered.ids, rendered.answer_mask
    if len(ids) <= limit:
        return ids, mask, False
    if how == "quarantine":
        raise Refused("too_long", f"the row is {len(ids)} tokens, limit {limit}: raise ingest.longest_tokens", "")
    prompt = mask.index(True)
    if how == "prompt_start":
        excess = min(len(ids) - limit, prompt - 1)
        ids, mask = ids[:1] + ids[1 + excess :], mask[:1] + mask[1 + excess :]
    ids, mask = ids[:limit], mask[:limit]
    if not any(mask):
        detail = f"answer truncated away: prompt is {prompt} tokens, limit {limit}"
        raise Refused(
            "truncated", f"{detail}; raise ingest.longest_tokens or set ingest.truncation to prompt_start", ""
        )
    return ids, mask, True
