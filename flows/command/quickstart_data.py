"""The quick start's data: real text that is installed already, split so that selection has something to do.

The target is short factual answers to trivia questions. The pool holds a few of those among much that does not help:
small talk and code from the package `chatterbot-corpus` (BSD), and pages of the Python manual from the standard
library. Files are read as data; nothing of the package is imported.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import yaml

from data_contracts.errors import InputError

TARGET_TOPIC = "trivia"
OTHER_TOPICS = ("ai", "coding", "emotion", "food", "gossip", "humor", "literature", "money", "psychology", "science")
LONGEST_ANSWER = 160
"""Characters: longer answers cost time and teach nothing here."""


class Sizes(NamedTuple):
    """Rows of each part."""

    target: int = 24
    validation: int = 24
    holdout: int = 64
    pool_of_target: int = 40
    other_topic: int = 8
    manual: int = 24


SIZES = Sizes()


def write(folder: Path, sizes: Sizes = SIZES, seed: int = 7) -> dict[str, int]:
    """Write target, validation, holdout and the pool's files below `folder` and return the rows of each.

    Raises `InputError` where the package is not installed.
    """
    order = random.Random(seed)  # noqa: S311 - an order, not a secret
    trivia = list(_topic(TARGET_TOPIC))
    order.shuffle(trivia)
    parts: dict[str, list[dict[str, str]]] = {}
    for name, count in (("target", sizes.target), ("validation", sizes.validation), ("holdout", sizes.holdout)):
        parts[name], trivia = trivia[:count], trivia[count:]
    parts[f"pool/{TARGET_TOPIC}"] = trivia[: sizes.pool_of_target]
    for topic in OTHER_TOPICS:
        rows = list(_topic(topic))
        order.shuffle(rows)
        parts[f"pool/{topic}"] = rows[: sizes.other_topic]
    pages = list(_manual())
    order.shuffle(pages)
    parts["pool/python_manual"] = pages[: sizes.manual]
    for name, rows in parts.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return {name: len(rows) for name, rows in parts.items()}


def _topic(name: str) -> Iterable[dict[str, str]]:
    """Yield each first question and its answer, once a question."""
    spec = find_spec("chatterbot_corpus")
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            "the quick start's text is installed",
            "the package chatterbot-corpus is not",
            "pip install 'lazytrain[quickstart]'",
        )
    file = Path(spec.submodule_search_locations[0]) / "data" / "english" / f"{name}.yml"
    seen: set[str] = set()
    for turns in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
        question, answer = str(turns[0]).strip(), str(turns[1]).strip()
        if question.lower() not in seen and answer and len(answer) <= LONGEST_ANSWER:
            seen.add(question.lower())
            yield {"prompt": question, "completion": answer}


def _manual() -> Iterable[dict[str, str]]:
    """Yield a question about each page of the Python manual and the first sentences of the page."""
    from pydoc_data.topics import topics

    for name, page in sorted(topics.items()):
        body = page.split("\n\n", 1)[-1]
        for paragraph in body.split("\n\n"):
            words = " ".join(paragraph.split())
            if 40 <= len(words) <= LONGEST_ANSWER and words.endswith("."):
                yield {"prompt": f"What does the Python manual say about {name}?", "completion": words}
                break
