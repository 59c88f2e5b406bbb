"""Loss of each item's answer: how surprised the model is by what should be said.

Applies to every item. `score` is minus the mean loss of an answer token in nats, so that higher is better; perplexity
is exp of the ratio of sums over items, so that every token weighs the same. The loss is training's cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from stages.evaluate.task import Bench, Item, Outcome, Task


class Perplexity(Task):
    """Sum of the loss over the answer tokens, and how many they are."""

    def outcomes(self, bench: Bench, items: Sequence[Item]) -> Iterator[Outcome]:
        """Yield one outcome an item; a loss that is not finite stands as it is, for the gates to see."""
        for item, (loss_sum, tokens) in zip(items, bench.losses([item.row for item in items]), strict=True):
            if tokens == 0:
                yield Outcome(item.item_id, note="no answer token has a token before it")
                continue
            note = "" if math.isfinite(loss_sum) else "the loss is not finite"
            yield Outcome(item.item_id, score=-loss_sum / tokens, loss_sum=loss_sum, answer_tokens=tokens, note=note)
