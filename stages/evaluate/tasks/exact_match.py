"""Exact match by greedy generation: does the model's own answer say what the reference says?

Applies to chats. What the metric read from the prediction is stored beside it; a prediction from which nothing can be
read scores 0 and says so, while a reference from which nothing can be read leaves the item without a score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field

from stages.evaluate.marking import mark
from stages.evaluate.task import Bench, Item, Outcome, Task
from stages.text.answers import Metric


class ExactMatch(Task):
    """Score 1 where prediction and reference give the same extract under `metric`, else 0."""

    metric: Metric = Field("normalised-text", description="What is compared: the text, or the last number in it.")
    max_new_tokens: int = Field(128, ge=1, description="Tokens an answer may have.")

    def outcomes(self, bench: Bench, items: Sequence[Item]) -> Iterator[Outcome]:
        """Yield an outcome for each chat with a text answer."""
        asked = []
        for item in items:
            if item.answer is None:
                continue
            room = bench.longest - len(item.prompt_ids)
            if room < self.max_new_tokens or not item.prompt_ids:
                note = f"the prompt leaves {max(room, 0)} of {self.max_new_tokens} positions for an answer"
                yield Outcome(item.item_id, note=note)
            else:
                asked.append(item)
        if not asked:
            return
        prompts = [item.prompt_ids for item in asked]
        for item, ids in zip(asked, bench.generate(prompts, self.max_new_tokens, _stops(bench, asked)), strict=True):
            text = bench.tokenizer.decode(ids, skip_special_tokens=True)
            marked = mark(text, item.answer or "", self.metric)
            note = marked.note or ("the answer was cut off" if len(ids) >= self.max_new_tokens else "")
            yield Outcome(
                item.item_id, marked.score, answer_tokens=0, prediction=text, extracted=marked.extracted, note=note
            )


def _stops(bench: Bench, items: Sequence[Item]) -> frozenset[int]:
    """Return the ids that end an answer: the end of text, and the special tokens that end the items' own answers."""
    special = set(bench.tokenizer.all_special_ids)
    ends = {int(item.row.input_ids[item.row.answer_mask][-1]) for item in items}
    end_of_text = bench.tokenizer.eos_token_id
    return frozenset((ends & special) | (set() if end_of_text is None else {end_of_text}))
