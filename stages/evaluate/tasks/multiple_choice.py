"""Multiple choice by log-likelihood: which of the choices the model finds likeliest as the answer.

Applies to chats whose `extra` holds `choices`, a list of at least two different texts, one of which is the last
assistant turn's text. Each choice is rendered in place of the answer, by the model's own template. Source: the
length-normalised accuracy of Brown et al. 2020, section 2.4, and its plain form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from stages.evaluate.task import Bench, Item, Outcome, Task
from stages.text.normalise import stored_form


class MultipleChoice(Task):
    """Score 1 where the likeliest choice is the answer, else 0; the first of equals counts as likeliest."""

    by: Literal["sum", "byte"] = Field("byte", description="Log-likelihood as it is, or a byte of the choice's text.")

    def outcomes(self, bench: Bench, items: Sequence[Item]) -> Iterator[Outcome]:
        """Yield an outcome for each item that has choices; without a score, and saying why, where they do not work."""
        asked = []
        for item in items:
            if "choices" in item.extra:
                rows = self._rows(bench, item)
                if isinstance(rows, str):
                    yield Outcome(item.item_id, note=rows)
                else:
                    asked.append((item, rows))
        found = iter(bench.losses([row for _, rows in asked for row in rows]) if asked else [])
        for item, rows in asked:
            yield self._mark(item, [next(found) for _ in rows])

    @staticmethod
    def _choices(item: Item) -> list[str] | None:
        choices = item.extra["choices"]
        texts = isinstance(choices, list) and all(isinstance(choice, str) and choice.strip() for choice in choices)
        return choices if texts and len({stored_form(c) for c in choices}) == len(choices) > 1 else None

    def _rows(self, bench: Bench, item: Item) -> list[Any] | str:
        """Return one row a choice, or why the item cannot be asked."""
        from stages.model.batch import Row
        from stages.text.refusal import Refused

        choices = self._choices(item)
        if choices is None:
            return "`choices` is no list of at least two different texts"
        if item.answer is None or _right(item, choices) is None:
            return "the answer is none of the choices"
        if item.truncated:
            return "the item was truncated"
        last = max(i for i, turn in enumerate(item.messages) if turn.get("role") == "assistant")
        rows = []
        for choice in [item.answer, *choices]:
            messages = [*item.messages[:last], {**item.messages[last], "content": choice}]
            try:
                rendered = bench.renderer.render(messages, item.tools)
            except Refused as refused:
                return f"a choice cannot be rendered: {refused}"
            if len(rendered.ids) > bench.longest:
                return f"a choice makes the item longer than the model's {bench.longest} positions"
            rows.append(Row(item.item_id, np.asarray(rendered.ids), np.asarray(rendered.answer_mask, bool)))
        if list(rows[0].input_ids) != list(item.row.input_ids):
            return "the answer rendered anew does not give the item's tokens"
        return rows[1:]

    def _mark(self, item: Item, losses: Sequence[tuple[float, int]]) -> Outcome:
        choices = self._choices(item) or []
        likelihood = [-loss for loss, _ in losses]
        if not all(map(math.isfinite, likelihood)):
            score = math.nan
            return Outcome(item.item_id, score, log_likelihoods=tuple(likelihood), note="a likelihood is not finite")
        plain = int(np.argmax(likelihood))
        by_byte = int(np.argmax([value / len(c.encode()) for value, c in zip(likelihood, choices, strict=True)]))
        chosen, right = (plain if self.by == "sum" else by_byte), _right(item, choices)
        loss, tokens = losses[right or 0]
        note = f"by sum: choice {plain + 1}; by byte: choice {by_byte + 1}; right: choice {(right or 0) + 1}"
        return Outcome(
            item.item_id,
            float(chosen == right),
            loss,
            tokens,
            choices[chosen],
            choices[chosen],
            tuple(likelihood),
            note,
        )


def _right(item: Item, choices: Sequence[str]) -> int | None:
    answer = stored_form(item.answer or "")
    return next((i for i, choice in enumerate(choices) if stored_form(choice) == answer), None)
