"""Which evaluation of a segment an arm is judged by."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.tables import VALIDATION_LOSSES
from stages.weigh.engine import best_evaluation

TOKENS = [4, 1, 5]


def table(evaluations: dict[int, list[float]], order: list[int]) -> pa.Table:
    rows = [
        {"step": step, "document": document, "loss_sum": losses[document], "answer_tokens": TOKENS[document]}
        for step, losses in evaluations.items()
        for document in order
    ]
    return pa.Table.from_pylist(rows, VALIDATION_LOSSES.schema)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_the_lowest_finite_evaluation_counts_in_the_order_of_documents(order: list[int]) -> None:
    found = {4: [4.0, 2.0, 9.0], 8: [4.0, 3.0, 6.0], 12: [0.0, 0.0, np.inf]}
    sums, tokens = best_evaluation(table(found, order))
    assert (sums.tolist(), tokens.tolist()) == ([4.0, 3.0, 6.0], TOKENS)


def test_where_no_evaluation_is_finite_the_last_one_says_so() -> None:
    sums, _ = best_evaluation(table({4: [np.nan, 1.0, 1.0], 8: [1.0, np.inf, 1.0]}, [0, 1, 2]))
    assert sums.tolist() == [1.0, np.inf, 1.0]
