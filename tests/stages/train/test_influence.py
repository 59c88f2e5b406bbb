"""Influence read in training against explicit gradients at each step's own weights, one row at a time in float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_contracts.arrow import TABLE_FILE
from data_contracts.config import BeginConfig, ScoreConfig, TrainConfig
from data_contracts.errors import InputError
from data_contracts.records import Decision, ModelPin
from stages.gradients.row_products import covered
from stages.model.batch import Row, TokenTable
from stages.model.checkpoint import load_checkpoint
from stages.score.stage import STAGE as SCORE
from stages.score.stage import ScoreSlice
from stages.technique import optimizer as steps
from stages.technique.step import moments_of, trainable
from stages.train import publish
from stages.train.begin import STAGE as BEGIN
from stages.train.begin import BeginSlice
from stages.train.influence import Influence
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.gradients.test_inner_product import explicit_gradient
from tests.stages.train.small import House, llama, token_columns
from tests.stages.train.test_resume import FORK, _rank
from tests.stages.train.test_stage import train

ADAM = {"beta2": 0.98, "epsilon": 1e-6}


def double(model: Any, values: dict[str, torch.Tensor]) -> Any:
    """Return the model in float64 with `values`, its norms exact."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            parameter.copy_(values[name])
    model = model.double()
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            norm = torch.nn.RMSNorm(16, eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight.data.copy_(module.weight)
            norm.weight.requires_grad_(module.weight.requires_grad)
            model.set_submodule(name, norm)
    return model


def row_of(table: TokenTable, index: int) -> Row:
    """Return a row with ids that torch's own loss takes."""
    row = table.row(index)
    return Row(row.example_id, row.input_ids.astype(np.int64), row.answer_mask.copy())


class Watched:
    """Notes weights and moments before each step, then takes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: list[tuple[Any, dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, torch.Tensor]]]] = []
        real = steps.optimizer_step

        def noted(model: Any, optimizer: Any, *args: Any, **settings: Any) -> Any:
            values = {name: p.detach().clone() for name, p in trainable(model).items()}
            moments = {name: (a.clone(), b.clone()) for name, (a, b) in moments_of(optimizer, model).items()}
            self.before.append((model, values, moments))
            return real(model, optimizer, *args, **settings)

        monkeypatch.setattr(steps, "optimizer_step", noted)

    def model(self, step: int) -> Any:
        """Return the model before 0-based step `step`, in float64."""
        return double(*self.before[step][:2])

    def direction(self, step: int, updates: int, target: TokenTable) -> dict[str, torch.Tensor]:
        """Return D Ḡ before that step, from its definition; the scales of norms take no part."""
        explicit = [explicit_gradient(self.model(step), row_of(target, index)) for index in range(len(target))]
        found = {}
        for name, (_, square) in self.before[step][2].items():
            if "norm" in name:
                continue
            mean = sum(gradient[name] / tokens for gradient, _, tokens in explicit) / len(explicit)
            root = (square.double() / (1 - ADAM["beta2"] ** updates)).sqrt() + ADAM["epsilon"]
            found[name] = torch.where(square > 0, mean / root, 0.0)
        return found


def expected(
    watched: Watched, step: int, direction: dict[str, torch.Tensor], house: House, ids: list[str]
) -> list[float]:
    pool, model = TokenTable(house.artifacts["tokens"].folder), watched.model(step)
    products = []
    for example_id in ids:
        gradient, _, _ = explicit_gradient(model, row_of(pool, pool.index_of(example_id)))
        products.append(sum(float((value * gradient[name]).sum()) for name, value in direction.items()))
    return products


@pytest.mark.parametrize(
    ("technique", "packed", "when", "made"),
    [
        ({"method": "full"}, False, "segment", [1, 1, 1]),
        ({"method": "full"}, True, "evaluation", [1, 2, 2]),
        ({"method": "lora", "r": 4}, False, "evaluation", [1, 2, 2]),
    ],
)
def test_every_visit_has_the_product_of_its_own_gradient_at_its_steps_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, technique: dict[str, Any], packed: bool, when: str, made: list[int]
) -> None:
    """Four steps of four rows from a model without moments: those of the first step make the first direction."""
    plan = {"technique": technique, "packed": packed, "row_tokens": 48 if packed else 24}
    house, watched = House(tmp_path, rows=16, plan=plan), Watched(monkeypatch)
    summary, work = train(tmp_path / "work", house, evaluations=2, influence=when, **ADAM)
    rows = work.rows("example_influence")
    visits = [(row["step"], row["position"], row["example_id"]) for row in work.rows("example_losses")]
    assert [(row["step"], row["position"], row["example_id"]) for row in rows] == [v for v in visits if v[0] > 1]
    target = TokenTable(house.artifacts["target_tokens"].folder)
    for step in (1, 2, 3):
        here = [row for row in rows if row["step"] == step + 1]
        assert {row["direction_step"] for row in here} == {made[step - 1]}
        direction = watched.direction(made[step - 1], made[step - 1], target)
        oracle = np.array(expected(watched, step, direction, house, [row["example_id"] for row in here]))
        np.testing.assert_allclose([row["influence"] for row in here], oracle, atol=3e-5 * np.abs(oracle).max())
    costs = work.ledger().by_cause()
    assert costs["score"].tokens == int(target.lengths.sum()) * len(set(made))
    assert work.rows("curve")[-1]["flops"] == sum(cost.flops for cost in costs.values())
    assert summary.facts["rows_with_influence"] == 12


def test_from_a_checkpoint_with_moments_the_first_step_has_influence_too_and_equals_the_scorers(tmp_path: Path) -> None:
    """The direction is the one that the score stage makes from the same checkpoint."""
    house = House(tmp_path, rows=8)
    _, first = train(tmp_path / "first", house, **ADAM)
    checkpoint = first.artifact("checkpoint")
    _, work = train(tmp_path / "second", house, more={"checkpoint": checkpoint}, influence="segment", **ADAM)
    rows = [row for row in work.rows("example_influence") if row["step"] == 3]
    assert len(rows) == 4
    assert {row["direction_step"] for row in rows} == {2}
    scored = scores_of(tmp_path / "score", house, house.pin, checkpoint)
    values = np.array([row["influence"] for row in rows])
    np.testing.assert_allclose(values, [scored[row["example_id"]] for row in rows], atol=0.02 * np.abs(values).max())


def scores_of(folder: Path, house: House, pin: ModelPin, checkpoint: Any) -> dict[str, float]:
    work: LocalWork = work_for(SCORE, folder)
    given = {name: house.artifacts[name] for name in ("base", "plan", "target_tokens")}
    inputs = inputs_of(**given, pool_tokens=house.artifacts["tokens"], checkpoint=checkpoint)
    SCORE.run(ScoreSlice(seed=0, score=ScoreConfig(scorer={"method": "influence"})), inputs, work)
    return {row["example_id"]: row["score"] for row in work.rows("scores")}


def test_training_is_what_it_would_be_without(tmp_path: Path) -> None:
    house = House(tmp_path, rows=12)
    weights = []
    for number, influence in enumerate((None, "evaluation")):
        _, work = train(tmp_path / str(number), house, influence=influence)
        weights.append(load_checkpoint(work.artifact("checkpoint").folder, house.pin).model.state_dict())
        assert ("example_influence" in work.opened) == (influence is not None)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6)


def forked(entry: str, job: dict[str, Any], *, folder: Path, workers: int, **_: Any) -> None:
    """Run the segment on forked gloo ranks, without Ray."""
    ranks = [FORK.Process(target=_rank, args=(rank, job, str(folder / "meeting"))) for rank in range(workers)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0


def test_two_ranks_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, costs = [], []
    for workers in (0, 2):
        plan = {"technique": {"method": "lora", "r": 4}, "micro_batch": 1, "workers": workers}
        house = House(tmp_path / str(workers), rows=12, plan=plan | {"accumulation": 2 if workers else 4})
        if workers:
            monkeypatch.setattr(publish, "run_workers", forked)
        _, work = train(tmp_path / f"work{workers}", house, influence="evaluation", evaluations=2)
        tables.append(work.rows("example_influence"))
        costs.append(work.ledger().by_cause()["score"])
    one, two = (np.array([row.pop("influence") for row in table]) for table in tables)
    assert tables[0] == tables[1]
    assert len(one) == 8
    np.testing.assert_allclose(two, one, atol=1e-4 * np.abs(one).max())
    assert costs[0].flops == costs[1].flops > 0


@pytest.mark.parametrize("empty", [False, True])
def test_without_a_target_it_is_refused(tmp_path: Path, empty: bool) -> None:
    house = House(tmp_path, rows=4)
    del house.artifacts["target_tokens"]
    if empty:
        none = LocalWork(tmp_path / "none", {"t": "tokens"})
        none.table("t", {name: [] for name in token_columns(1, 1)})
        house.artifacts["target_tokens"] = none.artifact("t")
    with pytest.raises(InputError, match="target with at least one row"):
        train(tmp_path / "work", house, influence="segment")


def test_the_warm_up_reads_none(tmp_path: Path) -> None:
    """It has no target, and no moments to start from."""
    house, work = House(tmp_path, rows=8), work_for(BEGIN, tmp_path / "work")
    config = BeginSlice(seed=3, begin=BeginConfig(fraction=0.5), train=TrainConfig(influence="segment"))
    BEGIN.run(config, house.begin_inputs(), work)
    assert set(work.opened) == set(BEGIN.gives) - BEGIN.optional


def test_directions_are_counted_before_they_are_made_so_a_budget_affords_fewer_steps(tmp_path: Path) -> None:
    """A budget that just holds all six steps and their evaluations does not hold directions too."""
    _, plain = train(tmp_path / "plain", House(tmp_path, rows=24), evaluations=2)
    limit = sum(cost.flops for cost in plain.ledger().by_cause().values())
    decision = Decision(action="continue", reason="test", round=1, segment_flops=limit)
    steps = {}
    for influence in (None, "segment", "evaluation"):
        house = House(tmp_path, rows=24, decision=decision)
        _, work = train(tmp_path / str(influence), house, influence=influence, evaluations=2)
        steps[influence] = len(work.rows("curve"))
    assert steps[None] == 6 > steps["segment"] >= steps["evaluation"] >= 1


def test_a_direction_out_of_a_file_is_multiplied_at_an_address_of_its_own(tmp_path: Path) -> None:
    """A resumed segment's last bits differed: what safetensors gave was not aligned as what training had made."""
    house, model = House(tmp_path, rows=4), llama()
    target = house.artifacts["target_tokens"].folder / TABLE_FILE
    influence = Influence(target, model, TrainConfig(), 256)
    name = covered(model)[0]
    shape = dict(model.named_parameters())[name].shape
    flat = torch.randn(shape.numel() + 1)[1:]
    assert flat.data_ptr() % 64
    influence.hold({name: flat.view(shape)})
    (held,) = influence.direction.values()
    assert held.data_ptr() % 64 == 0
    assert torch.equal(held.flatten(), flat)
