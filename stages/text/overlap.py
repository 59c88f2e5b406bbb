"""Where training rows meet evaluation items: whole, up to spelling, by the same prompt, or by long word n-grams.

Only what a model reads is compared: ids, extra keys, system turns, case and spacing cannot hide a match. The items are
indexed once; training rows stream past, and memory grows with the items only. What a meeting means for a verdict is
`judge`'s business. Source: Brown et al. 2020, appendix C (13-grams).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stages.text.ngrams import Grams, grams
from stages.text.normalise import match_digest, stored_form, words

Kind = Literal["exact", "normalised", "prompt", "ngram"]
BOILERPLATE_ITEMS = 3
"""A prompt or n-gram that this many items share is an instruction common to them, and no sign of a leak."""


@dataclass(frozen=True)
class Document:
    """What a model reads of a row: everything before the last assistant turn, and that turn (or a plain text)."""

    id: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Meeting:
    """One item met by one training row; `overlap` is the share of the item's n-grams, 1 for the other kinds."""

    item_id: str
    example_id: str
    kind: Kind
    overlap: float
    detail: str


def document_of(id_: str, messages: Sequence[Mapping[str, Any]], text: str = "") -> Document:
    """Return the document of a chat, or of a plain text (whose prompt is empty). System turns are left out."""
    turns = [turn for turn in messages if turn.get("role") not in ("system", "developer")]
    if not turns:
        return Document(id_, "", text)
    last = max((i for i, turn in enumerate(turns) if turn.get("role") == "assistant"), default=len(turns))
    answer = _content(turns[last]) if last < len(turns) else ""
    return Document(id_, "\n".join(_content(turn) for turn in turns[:last]), answer)


def documents(rows: Iterable[Mapping[str, Any]]) -> Iterator[Document]:
    """Yield the documents of rows of an `examples` table."""
    for row in rows:
        yield document_of(row["example_id"], json.loads(row["messages"]) if row["messages"] else [], row["text"])


def _content(turn: Mapping[str, Any]) -> str:
    content = turn.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part, Mapping) and "text" in part)
    return json.dumps(turn.get("tool_calls") or "", ensure_ascii=False, sort_keys=True)


class OverlapIndex:
    """Evaluation items, ready to be met.

    Args:
        items: the evaluation items.
        n: words of an n-gram. An item of at least `least_words` but fewer than `n` words is one n-gram of its length;
            a shorter one can only be met whole or by its prompt.
        threshold: least share of an item's n-grams that one training row must hold to meet it, in (0, 1].
    """

    def __init__(self, items: Iterable[Document], *, n: int = 13, least_words: int = 8, threshold: float = 0.5) -> None:
        self.n, self.least_words, self.threshold = n, least_words, threshold
        self.ids: list[str] = []
        self._whole: dict[bytes, list[int]] = {}
        self._prompts: dict[bytes, list[int]] = {}
        self._stored: list[tuple[str, str]] = []
        found: dict[int, list[tuple[int, Grams]]] = {}
        for index, item in enumerate(items):
            self.ids.append(item.id)
            self._stored.append((stored_form(item.prompt), stored_form(item.answer)))
            self._whole.setdefault(match_digest(item.prompt, item.answer), []).append(index)
            if item.prompt.strip():
                self._prompts.setdefault(match_digest(item.prompt), []).append(index)
            text = words(f"{item.prompt} {item.answer}")
            size = min(n, len(text))
            if size >= least_words:
                found.setdefault(size, []).append((index, grams(text, size)))
        self._grams = {size: _Postings(owned, len(self.ids)) for size, owned in sorted(found.items())}

    def __len__(self) -> int:
        return len(self.ids)

    def meet(self, row: Document) -> list[Meeting]:
        """Return the items that a training row meets, in the order of the items, each by its strongest kind."""
        found: dict[int, tuple[Kind, float, str]] = {}
        text = words(f"{row.prompt} {row.answer}")
        for size, postings in self._grams.items():
            for index, share in postings.shares(grams(text, size)):
                if share >= self.threshold:
                    found[index] = ("ngram", share, f"{share:.0%} of the item's {size}-grams stand in the row")
        if row.prompt.strip():
            same = self._prompts.get(match_digest(row.prompt), [])
            if len(same) < BOILERPLATE_ITEMS:
                found |= dict.fromkeys(same, ("prompt", 1.0, "the same prompt with another answer"))
        stored = (stored_form(row.prompt), stored_form(row.answer))
        for index in self._whole.get(match_digest(row.prompt, row.answer), []):
            exact = stored == self._stored[index]
            found[index] = (
                ("exact", 1.0, "the same text") if exact else ("normalised", 1.0, "differs only in case and spaces")
            )
        return [Meeting(self.ids[index], row.id, *found[index]) for index in sorted(found)]


class _Postings:
    """Which items hold an n-gram, for one n; n-grams that `BOILERPLATE_ITEMS` items share are left out."""

    def __init__(self, owned: Sequence[tuple[int, Grams]], items: int) -> None:
        hashes = np.concatenate([own for _, own in owned])
        owners = np.concatenate([np.full(len(own), index) for index, own in owned])
        _, inverse, count = np.unique(hashes, return_inverse=True, return_counts=True)
        telling = count[inverse] < BOILERPLATE_ITEMS
        order = np.argsort(hashes[telling], kind="stable")
        self._hashes, self._owners = hashes[telling][order], owners[telling][order]
        self._sizes = np.bincount(self._owners, minlength=items)

    def shares(self, row: Grams) -> list[tuple[int, float]]:
        """Return (item, share of its telling n-grams found in `row`) for the items met at all."""
        if not len(row) or not len(self._hashes):
            return []
        first, last = (np.searchsorted(self._hashes, row, side=side) for side in ("left", "right"))
        met = np.flatnonzero(last > first)
        hits = Counter(int(owner) for at in met for owner in self._owners[first[at] : last[at]])
        return [(index, hits[index] / int(self._sizes[index])) for index in sorted(hits)]
