"""What a way of choosing reads and takes at the least, told from its settings.

Scores that nothing reads would be paid for in vain, and so would scores that leave nothing to train with.
"""

from __future__ import annotations

import math

from data_contracts.config import ScoreConfig, SelectConfig
from data_contracts.errors import BudgetError
from data_contracts.method import find, name_in, resolve
from data_contracts.records import Decision, Plan
from stages.mix.mixture import Mixture
from stages.score.cover import Coverage
from stages.score.scorer import Scorer
from stages.select.noise import NoiseFilter
from stages.select.selector import Selector


def reads_scores(select: SelectConfig) -> bool:
    """Return whether scores, or the features that scoring leaves, decide what is selected."""
    if select.count == 0:
        return False  # no row of the pool is chosen
    if resolve(Selector, select.selector, "select.selector").needs():
        return True
    if select.noise is not None and resolve(NoiseFilter, select.noise, "select.noise").needs_scores:
        return True
    if select.mixture is None:
        return False
    mixture = find(Mixture, name_in(select.mixture, "select.mixture"))
    return bool(mixture.reads & {"scores", "features"})


def least_price(score: ScoreConfig, plan: Plan) -> int:
    """Return the FLOPs that scoring the pool takes at the least: one forward pass over the rows that a model reads.

    0 where no model reads any, and where the coverage computes a share of the rows that only it knows.
    """
    if "model" not in find(Scorer, name_in(score.scorer, "score.scorer")).reads:
        return 0
    share, coverage = 1.0, name_in(score.coverage, "score.coverage")
    if coverage == "cascade":
        filters = resolve(Coverage, score.coverage, "score.coverage").model_dump()["filters"]
        share = math.prod(float(settings["keep"]) for settings in filters)
    elif coverage != "full":
        return 0
    return int(share * plan.pass_flops * plan.flops_per_token_forward / max(1, plan.flops_per_token))


def refuse_unpayable(score: ScoreConfig, plan: Plan, decision: Decision) -> None:
    """Raise `BudgetError` where scoring leaves nothing of what may be spent."""
    spendable, price = decision.numbers.get("spendable_flops"), least_price(score, plan)
    if isinstance(spendable, int) and price >= spendable:
        raise BudgetError(
            "scoring the pool leaves something to train with",
            f"`score` reads it with a model, {price:,} FLOPs at the least, and {spendable:,} may be spent",
            "raise the budget, let cheap filters choose what is scored (`score.coverage`: cascade), score by text "
            "(`score.scorer`: bm25), or name `auto.arms`, which chooses what pays",
        )
