"""What an evaluation says to people: per suite and model, over the items that have a score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from data_contracts.records import Summary, Table
from stages.evaluate.task import Outcome

Cell = str | int | float | bool | None


def report(
    outcomes: Mapping[tuple[str, str], Sequence[Outcome]], models: Sequence[str], items: int, flops: int
) -> Summary:
    """Return the summary of an evaluation; losses in nats an answer token, over all of a suite's answer tokens."""
    rows: list[tuple[Cell, ...]] = []
    facts: dict[str, Cell] = {"items": items, "models": ", ".join(models), "FLOPs": flops}
    for suite, model in sorted(outcomes):
        found = outcomes[suite, model]
        scored = [outcome.score for outcome in found if outcome.score is not None]
        loss, tokens = _loss(found)
        mean = sum(scored) / len(scored) if scored else None
        rows.append((suite, model, len(scored), _finite(mean), _finite(loss), _perplexity(loss)))
        if loss is not None and tokens:
            facts[f"{suite}: loss of {model}"] = _finite(loss)
    columns = ("suite", "model", "items scored", "mean score", "loss", "perplexity")
    return Summary(
        title=f"evaluate: {', '.join(models)} on {items} holdout items",
        facts=facts,
        tables=(Table(title="Evaluation", columns=columns, rows=tuple(rows)),),
    )


def _loss(outcomes: Sequence[Outcome]) -> tuple[float | None, int]:
    pairs = [(o.loss_sum, o.answer_tokens) for o in outcomes if o.loss_sum is not None and o.answer_tokens]
    tokens = sum(count for _, count in pairs)
    return (sum(loss for loss, _ in pairs) / tokens, tokens) if tokens else (None, 0)


def _perplexity(loss: float | None) -> Cell:
    return _finite(math.exp(loss)) if loss is not None and loss < 700 else None  # exp overflows past 709


def _finite(value: float | None) -> Cell:
    return value if value is None or math.isfinite(value) else str(value)
