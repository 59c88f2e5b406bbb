"""Whether a way of choosing reads scores: where it does not, the pool is not scored and nothing is charged for it."""

from __future__ import annotations

from typing import Any

import pytest

from data_contracts.config import ScoreConfig, SelectConfig
from data_contracts.errors import BudgetError
from data_contracts.records import Decision
from flows.reading import least_price, reads_scores, refuse_unpayable
from tests.stages.governor.test_reallocation import PLAN as SMALL_PLAN

PLAN = SMALL_PLAN.model_copy(update={"pass_flops": 6000})
"""A pass trains for 6 FLOPs a token and reads for 2."""


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        ({"selector": {"method": "random"}, "fraction": 1.0}, False),
        ({"selector": {"method": "top_k"}, "count": 0, "include_target": True}, False),
        ({"selector": {"method": "random"}, "noise": {"method": "answer_fit"}}, False),
        ({"selector": {"method": "random"}, "mixture": {"method": "odm"}}, False),
        ({"selector": {"method": "top_k"}}, True),
        ({"selector": {"method": "k_center"}}, True),
        ({"selector": {"method": "random"}, "noise": {"method": "loss"}}, True),
        ({"selector": {"method": "random"}, "mixture": {"method": "gst"}}, True),
    ],
)
def test_scores_are_read_by_what_cannot_do_without_them(settings: dict[str, Any], reads: bool) -> None:
    assert reads_scores(SelectConfig(**settings)) is reads


@pytest.mark.parametrize(
    ("settings", "price"),
    [
        ({"scorer": {"method": "influence"}}, 2000),
        ({"scorer": {"method": "perplexity"}}, 2000),
        ({"scorer": {"method": "bm25"}}, 0),
        ({"coverage": {"method": "cascade", "filters": [{"method": "bm25", "keep": 0.25}]}}, 500),
        ({"coverage": {"method": "cascade"}}, 800),
        ({"coverage": {"method": "proxy_verify"}}, 0),
    ],
)
def test_scoring_takes_a_forward_pass_over_the_rows_that_a_model_reads_at_the_least(
    settings: dict[str, Any], price: int
) -> None:
    score = ScoreConfig(**settings)
    assert least_price(score, PLAN) == price

    def decision(spendable: int | None) -> Decision:
        return Decision(action="reselect", reason="", round=0, numbers={"spendable_flops": spendable})

    refuse_unpayable(score, PLAN, decision(None))
    refuse_unpayable(score, PLAN, decision(price + 1))
    if price:
        with pytest.raises(BudgetError, match=rf"{price:,} FLOPs at the least, and {price:,} may be spent"):
            refuse_unpayable(score, PLAN, decision(price))
