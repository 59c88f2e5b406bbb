"""What each stage charges, against formulas worked out by hand for the rows that it saw.

A row of T tokens, A of them predicted, through a Llama of L layers (H channels, K of them keys and values, F inner, V
words): forward two operations a weight and token, attention's two products of T² H each, and the head a predicted
token. Training is three times the products; attention has five products backward for two forward (14 L H T² in all).
Padded tokens count. Everything is equal to the formula, not near it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_contracts.config import GovernConfig, TrainConfig
from stages.coreset.matching_pursuit import matching_pursuit
from stages.coreset.spread import dpp_map
from stages.evaluate.stage import STAGE as EVALUATE
from stages.evaluate.stage import EvaluateSlice
from stages.gradients.differences import STEPS
from stages.meter.products import product, tallied
from stages.mix.stage import STAGE as MIX
from stages.mix.stage import MixSlice
from stages.model.batch import Row
from stages.stage import Artifact
from stages.train.begin import STAGE as BEGIN
from stages.train.begin import BeginSlice
from stages.train.stage import STAGE as TRAIN
from stages.train.stage import TrainSlice
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.evaluate.holdouts import STORIES, Bundle, chat
from tests.stages.gradients.small_models import rows_of
from tests.stages.score.setting import Setting, make_setting
from tests.stages.select.pools import chosen, pool_of
from tests.stages.select.test_coreset_selectors import Pool as FeaturePool
from tests.stages.train.small import VOCABULARY, House, plan_of, token_columns, write_model

H, K, F, L = 16, 8, 24, 2
SHAPES = ((H, H), (H, K), (H, K), (H, H), (H, F), (H, F), (F, H))
W = sum(inputs * outputs for inputs, outputs in SHAPES)
T = 12


def forward(tokens: int, answers: int, words: int = VOCABULARY) -> int:
    return L * (2 * W * tokens + 4 * H * tokens**2) + 2 * H * words * answers


def train(tokens: int, answers: int, words: int = VOCABULARY) -> int:
    return L * (6 * W * tokens + 14 * H * tokens**2) + 6 * H * words * answers


def even(folder: Path, rows: int, seed: int) -> Artifact:
    """Rows of T tokens each, so that none is padded."""
    columns = token_columns(rows, seed)
    rng = np.random.default_rng(seed)
    masks = [[place >= start for place in range(T)] for start in rng.integers(1, T, rows)]
    work = LocalWork(folder, {"t": "tokens"})
    more = {"n_tokens": [T] * rows, "n_answer_tokens": [sum(mask) for mask in masks], "answer_mask": masks}
    work.table("t", columns | more | {"input_ids": rng.integers(2, VOCABULARY, (rows, T)).tolist()})
    return work.artifact("t")


def answers(tokens: Artifact, ids: Iterable[str] | None = None) -> list[int]:
    wanted = None if ids is None else set(ids)
    rows = tokens.table().to_pylist()
    return [row["n_answer_tokens"] for row in rows if wanted is None or row["example_id"] in wanted]


def flops(work: LocalWork) -> dict[str, int]:
    return {cause: cost.flops for cause, cost in work.ledger().by_cause().items()}


def test_training_charges_each_visit_and_each_evaluation(tmp_path: Path) -> None:
    house, pool, validation = House(tmp_path, rows=12), even(tmp_path / "pool", 12, 1), even(tmp_path / "v", 9, 2)
    work = work_for(TRAIN, tmp_path / "work", seed=3)
    settings = TrainConfig(learning_rate=1e-2, warmup_steps=0, epochs=2.0, evaluations=3)
    policy = GovernConfig(policy={"method": "fixed_rounds", "rounds": 1})
    TRAIN.run(
        TrainSlice(seed=3, train=settings, govern=policy),
        house.inputs(tokens=pool, validation_tokens=validation),
        work,
    )
    one = sum(forward(T, count) for count in answers(validation))
    assert flops(work) == {"train": 2 * sum(train(T, count) for count in answers(pool)), "eval": 3 * one}


def test_the_warm_up_charges_its_steps_and_evaluations_the_one_before_the_first_step_too(tmp_path: Path) -> None:
    house, pool, validation = House(tmp_path, rows=40), even(tmp_path / "pool", 40, 1), even(tmp_path / "v", 9, 2)
    config = BeginSlice.model_validate(
        {"seed": 3, "begin": {"fraction": 0.25}, "train": {"warmup_steps": 4, "learning_rate": 1e-2}}
    )
    work = work_for(BEGIN, tmp_path / "work", seed=3)
    given = house.begin_inputs()
    BEGIN.run(config, inputs_of(base=given.one("base"), plan=given.one("plan"), pool_tokens=pool,
                                validation_tokens=validation), work)  # fmt: skip
    visited = [row["example_id"] for row in work.rows("example_losses")]
    evaluations = sum(row["validation_loss"] is not None for row in work.rows("curve"))
    one = sum(forward(T, count) for count in answers(validation))
    spent = flops(work)
    assert len(visited) == len(set(visited)) >= 8
    assert evaluations >= 2
    assert spent.pop("eval") == evaluations * one
    assert spent == {"warm_up": sum(train(T, count) for count in answers(pool, visited))}


POOL, TARGET = rows_of(24, seed=1), rows_of(6, seed=2)
WORDS, TRAINED = 61, 61 * H + L * (W + 2 * H) + H
"""Words of the scored model, and its parameters: two norms a layer, one at the end, embedding and head are one."""


def seen(rows: list[Row], price: Any, *, head: bool = True) -> int:
    return sum(price(len(row.input_ids), int(row.answer_mask[1:].sum()) if head else 0, WORDS) for row in rows)


def alone(rows: list[Row]) -> int:
    """The answers without their prompts: nothing predicts their first token."""
    lengths = [int(row.answer_mask.sum()) for row in rows]
    return sum(forward(length, length - 1, WORDS) for length in lengths)


EVERY = POOL + TARGET
SKETCH = len(EVERY) * 2 * 2 * TRAINED  # two parts of the sketch, a multiply-add a coordinate
SCORERS: list[tuple[dict[str, Any], int]] = [
    ({"method": "perplexity"}, seen(POOL, forward)),
    ({"method": "el2n"}, seen(POOL, forward)),
    ({"method": "ifd_loss"}, seen(POOL, forward) + alone(POOL)),
    ({"method": "ifd_ppl"}, seen(POOL, forward) + alone(POOL)),
    ({"method": "rho_loss"}, 2 * seen(POOL, forward)),
    ({"method": "embedding"}, seen(EVERY, forward, head=False) + 24 * 2 * H),
    ({"method": "rds_plus"}, seen(EVERY, forward, head=False) + 24 * 6 * 2 * H),
    ({"method": "grand"}, seen(POOL, train)),
    ({"method": "influence"}, seen(EVERY, train)),
    (  # the direction, the exact products of the target's rows, two passes a step that is tried, two a row
        {"method": "influence_forward"},
        2 * seen(TARGET, train) + len(STEPS) * 2 * seen(TARGET, forward) + 2 * seen(POOL, forward),
    ),
    ({"method": "less", "dimensions": 32}, seen(EVERY, train) + SKETCH + 24 * 2 * 32),
    (  # ΦᵀΦ, the solution (2 K³/3 + 2 K²) and the scores
        {"method": "trak", "dimensions": 32},
        seen(EVERY, train) + SKETCH + 24 * 2 * 32 * 32 + 2 * 32**3 // 3 + 2 * 32 * 32 + 24 * 2 * 32,
    ),
    *(({"method": name}, 0) for name in ("length", "random")),
]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    made = make_setting(tmp_path_factory.mktemp("scored"), checkpoint=True)
    made.inputs["reference"] = made.inputs["checkpoint"]
    return made


@pytest.mark.parametrize(("scorer", "operations"), SCORERS, ids=[scorer["method"] for scorer, _ in SCORERS])
def test_a_scorer_charges_its_passes_and_products(setting: Setting, scorer: dict[str, Any], operations: int) -> None:
    work, _ = setting.score(scorer["method"], scorer=scorer, batch_tokens=1)  # a row a batch: no padding
    assert flops(work) == {"score": operations}


def test_a_mixture_charges_its_short_trainings_and_what_it_reads_of_the_target(tmp_path: Path) -> None:
    given = LocalWork(tmp_path / "given", {"base": "base", "plan": "plan"})
    given.record("base", write_model(tmp_path / "model"))
    given.record("plan", plan_of(micro_batch=1, row_tokens=T))
    pool, target = even(tmp_path / "pool", 24, 1), even(tmp_path / "target", 6, 2)
    for tokens in (pool, target):
        assert len(set(answers(tokens))) > 1
    probe = {"steps": 3, "window": 4, "learning_rate": 3e-3, "r": 2, "alpha": 8}
    mixture = {"method": "op_mix", "probe": probe, "points": 4, "held_out": 3, "starts": 1}
    work = work_for(MIX, tmp_path / "work", seed=1)
    config = MixSlice.model_validate({"seed": 1, "select": {"mixture": mixture, "fraction": 0.1}, "train": {}})
    given_to = {"base": given.artifact("base"), "plan": given.artifact("plan")}
    MIX.run(config, inputs_of(**given_to, pool_tokens=pool, target_tokens=target), work)
    # three parts' trainings and the choice's, of 12 rows; 3 + 4 + 3 mixtures and the choice read on the target
    adapters = sum(2 * (inputs + outputs) for inputs, outputs in SHAPES)
    first = sum(2 * inputs for inputs, _ in SHAPES[:3])  # nothing below the first three of layer 0 trains
    below = sum(inputs * outputs for inputs, outputs in SHAPES[:3])
    body = L * (4 * W * T + 14 * H * T**2) - 2 * below * T + 2 * T * (3 * L * adapters - first)
    low, high = (4 * 12 * (body + 4 * H * VOCABULARY * some(answers(pool))) for some in (min, max))
    read = 11 * sum(forward(T, count) for count in answers(target))
    spent = flops(work)
    assert low < spent["probe"] - read < high < 1.15 * low
    assert (spent["probe"] - read - 48 * body) % (4 * H * VOCABULARY) == 0  # all but the drawn rows' answers is exact


@pytest.mark.shared
def test_evaluation_charges_losses_and_answers_by_cause(tmp_path: Path, shared: Path) -> None:
    bundle = Bundle(tmp_path, shared)
    bundle.write([{"messages": chat(*story)} for story in STORIES])
    work = work_for(EVALUATE, tmp_path / "work")
    tasks = [{"method": "perplexity"}, {"method": "exact_match", "max_new_tokens": 5}]
    given = {name: bundle.artifact(name) for name in ("base", "holdout", "holdout_tokens")}
    EVALUATE.run(EvaluateSlice.model_validate({"seed": 0, "evaluate": {"tasks": tasks}}), inputs_of(**given), work)
    h, k, f, layers, words = 64, 32, 172, 5, 512
    weights = 2 * h * h + 2 * h * k + 3 * h * f

    def passed(tokens: int, logits: int, rows: int = 1) -> int:
        return rows * layers * (2 * weights * tokens + 4 * h * tokens**2) + 2 * h * words * logits

    rows = given["holdout_tokens"].table().to_pylist()
    losses = passed(max(row["n_tokens"] for row in rows), sum(row["n_answer_tokens"] for row in rows), len(rows))
    made = 0
    for row in work.rows("evaluation"):
        if row["suite"] == "exact_match":
            tokens = next(one for one in rows if one["example_id"] == row["item_id"])
            prompt = tokens["answer_mask"].index(True)
            assert row["note"] == "the answer was cut off"  # all five tokens were made: four of them were read too
            made += passed(prompt + 4, 5)
    spent = flops(work)
    assert spent["eval"] == losses
    assert spent["infer"] == made


def test_selecting_charges_the_products_of_features_and_none_where_nothing_is_compared(tmp_path: Path) -> None:
    pool = FeaturePool(tmp_path)
    count, (rows, numbers) = 5, pool.feature.shape
    _, work = pool.select("k", selector={"method": "k_center"}, count=count)
    assert flops(work) == {
        "select": 2 * rows * numbers + count * 2 * rows * numbers
    }  # the centre's, then each choice's
    _, plain = pool.select("r", selector={"method": "random"}, count=count)
    assert flops(plain) == {"select": 0}


def test_products_of_selectors_are_counted_by_hand() -> None:
    rng = np.random.default_rng(0)
    feature = rng.normal(size=(20, 6)).astype(np.float32)
    with tallied() as tally:
        chosen(pool_of(feature=feature), "facility_location", count=4)
    assert tally.flops == 2 * 20 * 20 * 6
    with tallied() as tally:
        dpp_map(feature, np.ones(20), 3)
    assert tally.flops == sum(2 * 20 * 6 + 2 * 20 * step for step in range(3))
    with tallied() as tally:  # 20 products with the residual, then a row against the rows and the wish, and its weight
        matching_pursuit(feature, feature[3], 1)
    along, gram, wish, weight, residual = 2 * 20 * 6, 2 * 6, 2 * 6, 2 * 1, 2 * 6
    assert tally.flops == along + gram + wish + weight + residual + 2 * 1


def test_a_product_of_sparse_rows_counts_the_numbers_that_meet() -> None:
    from scipy.sparse import random as scattered

    left, right = (scattered(9, 7, density=0.4, random_state=seed, format="csr") for seed in (1, 2))
    met = 2 * sum(int(left[i].multiply(right[j]).astype(bool).sum()) for i in range(9) for j in range(9))
    with tallied() as tally:
        product(left, right.T)
    assert tally.flops == met
    with tallied() as tally:
        product(left, np.ones((7, 3)))
    assert tally.flops == 2 * left.nnz * 3
    with tallied() as outer:
        with tallied() as inner:
            product(np.ones((2, 3)), np.ones(3))
        assert inner.flops == outer.flops == 2 * 2 * 3
