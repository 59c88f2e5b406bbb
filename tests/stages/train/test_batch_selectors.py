"""Rows picked in training against float64 gradients of every candidate at the step's own weights, and brute force."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_contracts.config import BeginConfig, TrainConfig
from data_contracts.errors import ConfigError, InputError
from data_contracts.records import Decision
from stages.coreset.greedy import kept_greedy
from stages.coreset.objectives import Alignment
from stages.gradients.examples import ExampleGradients
from stages.meter.flops import FlopCounter
from stages.model.batch import Row, TokenTable, collate
from stages.technique.batch_selector import batch_selector_of
from stages.technique.looking import look_passes
from stages.train import publish
from stages.train.begin import STAGE as BEGIN
from stages.train.begin import BeginSlice
from stages.train.snapshot import Snapshots
from tests.local_work import LocalWork, work_for
from tests.stages.gradients.test_inner_product import explicit_gradient
from tests.stages.train.small import House, llama
from tests.stages.train.test_influence import ADAM, Watched, forked, row_of
from tests.stages.train.test_stage import train

GREATS = {"method": "greats", "dimensions": 2**12, "every": 2}
COLM = {"method": "colm", "small": 0.1, "dimensions": 20}
MIXTURE = ["a", "b", "a", "b", "a", "rare", "b", "a", "a", "b", "a", "b"] * 2
WEIGHT = [1.0, 2.0, 0.5] * 8


def candidates_of(work: LocalWork, step: int) -> list[dict[str, Any]]:
    return [row for row in work.rows("example_choices") if row["step"] == step]


def gradients_of(
    watched: Watched, step: int, house: House, ids: list[str]
) -> list[tuple[dict[str, torch.Tensor], float]]:
    """Return (weight times the gradient of the summed loss, weight times answer tokens) of each row in float64."""
    pool, model, found = TokenTable(house.artifacts["tokens"].folder), watched.model(step), []
    for example_id in ids:
        weight = WEIGHT[house.ids.index(example_id)]
        gradient, _, tokens = explicit_gradient(model, row_of(pool, pool.index_of(example_id)))
        found.append(({name: weight * value for name, value in gradient.items()}, weight * tokens))
    return found


def flat(values: dict[str, torch.Tensor], names: list[str]) -> np.ndarray:
    return torch.cat([values[name].flatten().double() for name in names]).numpy()


@pytest.mark.parametrize(
    ("technique", "curvature"),
    [({"method": "full"}, 1.0), ({"method": "full"}, 0.0), ({"method": "lora", "r": 4}, 3.0)],
)
def test_greats_takes_the_rows_that_brute_force_finds_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, technique: dict[str, Any], curvature: float
) -> None:
    """Three steps of four rows out of eight; the first, without moments, takes rows as they come."""
    house = House(tmp_path, rows=24, plan={"technique": technique}, selection={"weight": WEIGHT})
    watched = Watched(monkeypatch)
    selector = GREATS | {"curvature": curvature, "dimensions": 2**20}
    _, work = train(tmp_path / "work", house, batch_selector=selector, evaluations=1, **ADAM)
    assert [row["chosen"] for row in candidates_of(work, 1)] == [True] * 4 + [False] * 4
    target = TokenTable(house.artifacts["target_tokens"].folder)
    for step, made in ((1, 1), (2, 2)):
        rows = candidates_of(work, step + 1)
        assert [row["position"] for row in rows] == list(range(8))
        names = [n for n in watched.before[step][1] if not any(part in n for part in ("norm", "embed", "lm_head"))]
        direction = flat(watched.direction(made, made, target), names)
        found = gradients_of(watched, step, house, [row["example_id"] for row in rows])
        mean = np.mean([tokens for _, tokens in found])
        gradient = np.stack([flat(each, names) for each, _ in found]) / mean
        square = {
            name: moments[1].double() / (1 - ADAM["beta2"] ** step) for name, moments in watched.before[step][2].items()
        }
        root = np.sqrt(flat(square, names)) + ADAM["epsilon"]
        inverse = np.where(flat(square, names) > 0, 1 / root, 0.0)
        worth, likeness = gradient @ direction, (gradient * inverse) @ gradient.T

        def value(rows: tuple[int, ...], worth: Any = worth, likeness: Any = likeness) -> float:
            return float(worth[list(rows)].sum() - curvature / 8 * likeness[np.ix_(rows, rows)].sum())

        taken: list[int] = []
        gains = {}
        for _ in range(4):
            best = max((row for row in range(8) if row not in taken), key=lambda row: value((*taken, row)))
            gains[best] = value((*taken, best)) - value(tuple(taken)) if taken else value((best,))
            taken.append(best)
        assert [row["position"] for row in rows if row["chosen"]] == sorted(taken)
        np.testing.assert_allclose(
            [row["gain"] for row in rows if row["chosen"]], [gains[row] for row in sorted(taken)],
            atol=0.02 * max(map(abs, gains.values())),
        )  # fmt: skip
        if curvature == 0:  # then it is the best of all subsets
            assert value(tuple(taken)) == pytest.approx(max(value(some) for some in combinations(range(8), 4)))


def test_alignment_is_greedy_on_its_set_function_also_where_rows_oppose_each_other() -> None:
    rng = np.random.default_rng(3)
    vector = rng.normal(size=(7, 4))
    worth, likeness = rng.normal(size=7), vector @ vector.T

    def value(rows: list[int]) -> float:
        return float(worth[rows].sum() - 0.4 * likeness[np.ix_(rows, rows)].sum())

    taken: list[int] = []
    for _ in range(7):
        taken.append(max(set(range(7)) - set(taken), key=lambda row: value([*taken, row])))
    rows, gains = kept_greedy(Alignment(worth, likeness, 0.8), 7)
    assert rows.tolist() == taken
    assert gains.sum() == pytest.approx(value(taken))


@pytest.mark.parametrize("packed", [False, True])
def test_colm_takes_the_medoids_of_each_source_by_the_last_value_projections_gradients_through_adam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    plan = {"packed": True, "row_tokens": 48, "micro_batch": 1, "accumulation": 4} if packed else {}
    house = House(tmp_path, rows=24, plan=plan, selection={"weight": WEIGHT, "mixture": MIXTURE})
    watched = Watched(monkeypatch)
    _, work = train(tmp_path / "work", house, batch_selector=COLM, evaluations=1, **ADAM)
    name = "model.layers.1.self_attn.v_proj.weight"
    assert "example_losses" in work.opened
    for step in range(3):
        rows = candidates_of(work, step + 1)
        source = np.array([MIXTURE[house.ids.index(row["example_id"])] for row in rows])
        found = gradients_of(watched, step, house, [row["example_id"] for row in rows])
        gradient = np.stack([each[name].numpy().ravel() for each, _ in found]) / np.mean([n for _, n in found])
        first, second = (each.double().numpy().ravel() for each in watched.before[step][2][name])
        m = (0.9 * first + 0.1 * gradient) / (1 - 0.9 ** (step + 1))
        v = (ADAM["beta2"] * second + (1 - ADAM["beta2"]) * gradient**2) / (1 - ADAM["beta2"] ** (step + 1))
        u = m / (np.sqrt(v) + ADAM["epsilon"])
        weight = {int(row): 1.0 for row in np.flatnonzero(source == "rare")}
        left = 4 - len(weight)
        order = {}
        for part in "ab":
            here = np.flatnonzero(source == part)
            kept = np.argsort(-np.abs(u[here].mean(axis=0)), kind="stable")[:20]
            distance = np.abs(u[here][:, None, kept] - u[here][None, :, kept]).sum(axis=2)
            near, taken = distance.max() - distance, list[int]()
            while len(taken) < len(here):
                covered = near[taken].max(axis=0) if taken else np.zeros(len(here))
                gain = np.maximum(near - covered, 0).sum(axis=1)
                gain[taken] = -1
                taken.append(int(gain.argmax()))
            order[part] = (here, near, taken)
        sizes = {part: len(order[part][0]) for part in "ab"}
        counts = {"a": 0, "b": 0}
        for _ in range(left):  # each goes to the part that is furthest behind its share
            part = min("ab", key=lambda part: ((counts[part] + 0.5) / sizes[part], -sizes[part], part))
            counts[part] += 1
        for part, count in counts.items():
            here, near, taken = order[part]
            stands = np.bincount(near[taken[:count]].argmax(axis=0), minlength=count) if count else []
            weight |= {int(here[row]): float(n) for row, n in zip(taken[:count], stands, strict=True)}
        scale = len(weight) / sum(weight.values())
        assert [row["position"] for row in rows if row["chosen"]] == sorted(weight)
        assert [row["weight"] for row in rows if row["chosen"]] == pytest.approx(
            [weight[row] * scale for row in sorted(weight)]
        )
        losses = [row["example_id"] for row in work.rows("example_losses") if row["step"] == step + 1]
        assert losses == [row["example_id"] for row in rows if row["chosen"]]


@pytest.mark.parametrize("selector", [GREATS, COLM], ids=["greats", "colm"])
def test_cut_off_and_run_again_the_same_bytes_come_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selector: dict[str, Any]
) -> None:
    def digests(folder: Path) -> dict[str, str]:
        house = House(tmp_path, rows=48, plan={"technique": {"method": "lora", "r": 4, "dropout": 0.1}})
        _, work = train(folder, house, batch_selector=selector | {"every": 4} if selector is GREATS else selector,
                        snapshot_steps=3, evaluations=2)  # fmt: skip
        return {name: work.artifact(name).ref.digest for name in sorted(work.opened)}

    expected, real = digests(tmp_path / "whole"), Snapshots.write

    def cut(self: Snapshots, step: int, *args: Any, **settings: Any) -> None:
        real(self, step, *args, **settings)
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Snapshots, "write", cut)
    with pytest.raises(KeyboardInterrupt):
        digests(tmp_path / "cut")
    monkeypatch.setattr(Snapshots, "write", real)
    assert digests(tmp_path / "cut") == expected
    assert "example_choices" in expected


@pytest.mark.parametrize("selector", [GREATS, COLM], ids=["greats", "colm"])
def test_two_ranks_choose_what_one_chooses_and_count_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selector: dict[str, Any]
) -> None:
    tables, costs = [], []
    for workers in (0, 2):
        plan = {"micro_batch": 1, "workers": workers, "accumulation": 2 if workers else 4}
        house = House(tmp_path / str(workers), rows=24, plan=plan)
        if workers:
            monkeypatch.setattr(publish, "run_workers", forked)
        _, work = train(tmp_path / f"work{workers}", house, batch_selector=selector, evaluations=1)
        tables.append([(row["step"], row["example_id"], row["chosen"]) for row in work.rows("example_choices")])
        costs.append(work.ledger().by_cause()["select"].flops)
    assert tables[0] == tables[1]
    assert costs[0] == costs[1] > 0


@pytest.mark.parametrize("selector", [GREATS, COLM], ids=["greats", "colm"])
def test_what_it_costs_is_in_the_ledger_and_within_what_a_segment_may_spend(
    tmp_path: Path, selector: dict[str, Any]
) -> None:
    house = House(tmp_path, rows=48)
    summary, work = train(tmp_path / "work", house, batch_selector=selector, evaluations=2)
    costs, lengths = (
        work.ledger().by_cause(),
        dict(zip(house.ids, house.artifacts["tokens"].table().column("n_tokens").to_pylist(), strict=True)),
    )
    rows = work.rows("example_choices")
    looked = [row for row in rows if selector is COLM or row["step"] > 1]
    assert costs["select"].tokens == sum(lengths[row["example_id"]] for row in looked)
    assert costs["train"].tokens == sum(lengths[row["example_id"]] for row in rows if row["chosen"])
    assert ("score" in costs) == (selector is GREATS)
    if selector is GREATS:  # after the first step, and again after the 2nd and the 4th of six
        target = house.artifacts["target_tokens"].table().column("n_tokens").to_pylist()
        assert costs["score"].tokens == 3 * sum(target)
    whole = sum(cost.flops for cost in costs.values())
    assert work.rows("curve")[-1]["flops"] == whole
    assert summary.facts["candidates"] == 48
    assert summary.facts["selection_flops"] == costs["select"].flops + (costs["score"].flops if "score" in costs else 0)
    decision = Decision(action="continue", reason="test", round=1, segment_flops=whole)
    _, less = train(
        tmp_path / "less", House(tmp_path, rows=48, decision=decision), batch_selector=selector, evaluations=2
    )
    spent = sum(cost.flops for cost in less.ledger().by_cause().values())
    assert 0.6 * whole < spent <= whole


@pytest.mark.parametrize("selector", [GREATS, COLM], ids=["greats", "colm"])
def test_the_price_of_a_look_is_what_its_passes_do(selector: dict[str, Any]) -> None:
    model, chosen = llama(tied=False), batch_selector_of(TrainConfig(batch_selector=selector))
    assert chosen is not None
    names = chosen.read(model)
    draw = np.random.default_rng(0)
    rows = [Row(str(n), draw.integers(2, 60, 12), np.arange(12) >= 7) for n in range(3)]
    batch = collate(rows)
    with ExampleGradients(model.eval(), parameters=names) as gradients, FlopCounter() as counter:
        gradients.of(batch, lambda name, some, gradient_dP: None)
    assert counter.total == look_passes(model, names).train(3, 12, len(batch.answers.label_N))


def test_what_cannot_be_picked_for_is_refused_before_anything_runs(tmp_path: Path) -> None:
    house = House(tmp_path, rows=12, plan={"technique": {"method": "badam"}})
    with pytest.raises(ConfigError, match="badam is another"):
        train(tmp_path / "badam", house, batch_selector=COLM)
    with pytest.raises(ConfigError, match="one direction of the target"):
        train(tmp_path / "both", House(tmp_path, rows=12), batch_selector=GREATS, influence="segment")
    for plan in ({"sharded": True, "workers": 2}, {"offload_activations": True}, {"optimizer_states": "mini"}):
        with pytest.raises(ConfigError, match="goes with the savings"):
            train(
                tmp_path / json.dumps(plan), House(tmp_path, rows=12, plan=plan | {"workers": 0}), batch_selector=COLM
            )
    technique = {"method": "lora", "target_modules": ["q_proj"]}
    with pytest.raises(ConfigError, match="v_proj, trains in the last decoder layer"):
        train(tmp_path / "layer", House(tmp_path, rows=12, plan={"technique": technique}), batch_selector=COLM)
    house = House(tmp_path, rows=12)
    del house.artifacts["target_tokens"]
    with pytest.raises(InputError, match=r"`train\.batch_selector` reads it"):
        train(tmp_path / "target", house, batch_selector=GREATS)
    with pytest.raises(ConfigError, match="12 rows < 2 x 2 x 4 = 16"):
        train(tmp_path / "few", House(tmp_path, rows=12), batch_selector=COLM | {"candidates": 4}, drop_last=True)


def test_the_warm_up_trains_on_what_it_draws(tmp_path: Path) -> None:
    house, work = House(tmp_path, rows=8), work_for(BEGIN, tmp_path / "work")
    config = BeginSlice(seed=3, begin=BeginConfig(fraction=0.5), train=TrainConfig(batch_selector=GREATS))
    BEGIN.run(config, house.begin_inputs(), work)
    assert set(work.opened) == set(BEGIN.gives) - BEGIN.optional
