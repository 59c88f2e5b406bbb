"""The stage `train` in this process: outputs, choices, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from data_contracts.arrow import read_table
from data_contracts.config import GovernConfig, TrainConfig
from data_contracts.errors import BudgetError, ConfigError, InputError, ModelError
from data_contracts.records import Decision, ModelPin
from stages.meter.memory import peak_resident_bytes, reset_peak, resident_bytes
from stages.model.batch import TokenTable, collate
from stages.model.checkpoint import load_checkpoint, load_merged
from stages.train.begin import STAGE as BEGIN
from stages.train.begin import BeginSlice
from stages.train.stage import STAGE, TrainSlice
from tests.local_work import LocalWork, work_for
from tests.stages.train.small import House, token_columns


def slice_of(**train) -> TrainSlice:
    settings = {"learning_rate": 1e-2, "warmup_steps": 0} | train
    policy = GovernConfig(policy={"method": "patience"})
    return TrainSlice(seed=3, train=TrainConfig(**settings), govern=policy)


def train(folder: Path, house: House, **settings):
    work = work_for(STAGE, folder, seed=3)
    more = settings.pop("more", {})
    summary = STAGE.run(slice_of(**settings), house.inputs(**more), work)
    return summary, work


def test_a_curriculum_is_trained_in_its_phases_and_says_how_many_were_begun(tmp_path):
    phases = [2, 0, 1] * 4
    house = House(tmp_path, rows=12, selection={"order": phases, "repeats": [2, 1, 1] * 4})
    summary, work = train(tmp_path / "work", house, epochs=0.75, evaluations=1)
    visited = [row["example_id"] for row in work.rows("example_losses")]
    phase_of = dict(zip(house.ids, phases, strict=True))
    steps = [row["step"] for row in work.rows("example_losses")]
    assert steps == [1] * 4 + [2] * 4 + [3] * 4
    assert [phase_of[example_id] for example_id in visited] == [0] * 4 + [1] * 4 + [2] * 4
    assert len(set(visited)) == 12
    assert summary.facts["phases"] == "3 of 3 begun"
    cut, _ = train(tmp_path / "cut", house, epochs=0.5, evaluations=1)
    assert cut.facts["phases"] == "2 of 3 begun"


def test_all_that_a_probe_costs_is_a_probes_evaluations_included(tmp_path):
    house = House(tmp_path, rows=12)
    plain, probe = (train(tmp_path / f"probe-{on}", house, evaluations=2, probe=on)[1] for on in (False, True))
    costs = probe.ledger().by_cause()
    assert set(costs) == {"probe"}
    assert costs["probe"].flops == probe.rows("curve")[-1]["flops"] == plain.ledger().total.flops
    assert costs["probe"].tokens == plain.ledger().total.tokens
    assert costs["probe"].seconds > 0


def test_a_segment_gives_a_curve_losses_a_checkpoint_and_charges(tmp_path):
    house = House(tmp_path, rows=12)
    summary, work = train(tmp_path / "work", house, epochs=2.0, evaluations=3)
    curve, losses = work.rows("curve"), work.rows("example_losses")
    assert [row["step"] for row in curve] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in curve if row["validation_loss"] is not None] == [2, 4, 6]
    assert [row["epoch"] for row in curve] == pytest.approx([i / 3 for i in range(1, 7)])
    assert all(row["validation_se"] > 0 for row in curve if row["validation_loss"] is not None)
    assert sorted(row["example_id"] for row in losses) == sorted(house.ids * 2)
    assert curve[-1]["tokens"] == 2 * sum(token_columns(12, 1)["n_tokens"])
    costs = work.ledger().by_cause()
    assert set(costs) == {"train", "eval"}
    assert curve[-1]["flops"] == costs["train"].flops + costs["eval"].flops
    assert costs["train"].tokens == curve[-1]["tokens"]
    assert costs["eval"].flops > 0
    assert costs["train"].seconds > 0
    assert summary.facts["steps"] == 6
    assert [(what, bar.total, bar.done) for what, bar in work.bars] == [("train", 6, 6)]
    assert summary.facts["rows"] == 12
    timing = read_table(work.measured("curve", "timing.arrow")).to_pylist()
    assert [row["step"] for row in timing if row["what"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert any(row["gradient_noise"] for row in curve)
    trainer = json.loads((work.artifact("checkpoint").folder / "trainer.json").read_text())
    best = min((row for row in curve if row["validation_loss"] is not None), key=lambda row: row["validation_loss"])
    assert trainer["step"] == best["step"]
    assert trainer["run_step"] == 6
    assert trainer["updates"] == best["step"]


def test_the_first_losses_are_those_of_the_base_and_the_train_loss_is_their_ratio(tmp_path):
    house = House(tmp_path, rows=12)
    _, work = train(tmp_path / "work", house)
    base = load_merged(None, house.pin)
    table = TokenTable(house.artifacts["tokens"].folder)
    first = [row for row in work.rows("example_losses") if row["step"] == 1]
    assert [row["position"] for row in first] == [0, 1, 2, 3]
    for row in first:
        one = table.row(table.index_of(row["example_id"]))
        with torch.no_grad():
            logits = base(input_ids=torch.from_numpy(one.input_ids.copy())[None].long()).logits[0, :-1]
        wanted = torch.from_numpy(one.answer_mask[1:].copy())
        labels = torch.from_numpy(one.input_ids[1:].copy()).long()
        assert row["loss_sum"] == pytest.approx(
            float(functional.cross_entropy(logits[wanted], labels[wanted], reduction="sum")), rel=1e-5
        )
        assert row["answer_tokens"] == int(wanted.sum())
    mean = sum(row["loss_sum"] for row in first) / sum(row["answer_tokens"] for row in first)
    assert work.rows("curve")[0]["train_loss"] == pytest.approx(mean, rel=1e-5)


def test_weights_and_repeats_of_the_selection_are_followed(tmp_path):
    settings = {"weight": [1.0, 0.0, 2.0, 0.5], "repeats": [1, 1, 3, 1]}
    house = House(tmp_path, rows=4, plan={"accumulation": 3}, selection=settings)
    _, work = train(tmp_path / "work", house)
    losses = work.rows("example_losses")
    assert len(losses) == 6
    assert sum(row["example_id"] == house.ids[2] for row in losses) == 3
    weight = dict(zip(house.ids, settings["weight"], strict=True))
    top = sum(weight[row["example_id"]] * row["loss_sum"] for row in losses)
    bottom = sum(weight[row["example_id"]] * row["answer_tokens"] for row in losses)
    assert work.rows("curve")[0]["train_loss"] == pytest.approx(top / bottom, rel=1e-5)


@pytest.mark.parametrize(
    "plan",
    [
        {"packed": True, "row_tokens": 40},
        {"micro_batch": 1, "accumulation": 4},
        {"micro_batch": 4, "accumulation": 1},
        {"recomputed_blocks": (0, 1)},
    ],
)
def test_packing_micro_batches_and_recomputation_do_not_change_what_is_learnt(tmp_path, plan):
    losses = []
    for name, settings in (("plain", {}), ("other", plan)):
        house = House(tmp_path / name, rows=12, plan=settings)
        _, work = train(tmp_path / name / "work", house, epochs=2.0, evaluations=2)
        losses.append([row["loss_sum"] for row in work.rows("example_losses")])
        losses.append([row["validation_loss"] for row in work.rows("curve") if row["validation_loss"] is not None])
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)
    assert losses[3] == pytest.approx(losses[1], rel=1e-3)


def test_lora_learns_the_same_with_recomputed_activations_and_nearly_the_same_in_bfloat16(tmp_path):
    lora, found = {"technique": {"method": "lora", "r": 4}}, []
    for name, more in (
        ("plain", {}),
        ("recomputed", {"recomputed_blocks": (0, 1)}),
        ("rough", {"precision": "bfloat16"}),
    ):
        house = House(tmp_path / name, rows=12, plan=lora | more)
        _, work = train(tmp_path / name / "work", house, epochs=2.0)
        found.append((work.rows("curve"), work.ledger().by_cause()["train"].flops))
    plain, again, rough = ([row["train_loss"] for row in curve] for curve, _ in found)
    assert again == pytest.approx(plain, rel=1e-5)
    assert rough == pytest.approx(plain, rel=2e-2)
    assert rough != plain
    assert found[1][1] > found[0][1] == found[2][1]  # the second forward pass is counted


def test_the_same_work_gives_the_same_bytes(tmp_path):
    house = House(tmp_path, rows=10)
    digests = []
    for name in ("first", "second"):
        _, work = train(tmp_path / name, house, epochs=1.5)
        digests.append([work.artifact(output).ref.digest for output in sorted(work.opened)])
    assert digests[0] == digests[1]


def test_a_second_segment_goes_on_from_the_first(tmp_path):
    house = House(tmp_path, rows=12, plan={"technique": {"method": "lora", "r": 4}})
    _, first = train(tmp_path / "first", house, warmup_steps=5)
    checkpoint = first.artifact("checkpoint")
    summary, second = train(tmp_path / "second", house, warmup_steps=5, more={"checkpoint": checkpoint})
    assert [row["step"] for row in first.rows("curve")] == [1, 2, 3]
    assert [row["step"] for row in second.rows("curve")] == [4, 5, 6]
    rates = [row["learning_rate"] / 1e-2 for row in first.rows("curve") + second.rows("curve")]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    before = json.loads((checkpoint.folder / "trainer.json").read_text())
    assert summary.facts["loss_before"] == before["validation"]["loss"]
    pin = house.artifacts["base"].record(ModelPin)
    loaded = load_checkpoint(second.artifact("checkpoint").folder, pin)
    assert loaded.trainer["updates"] == before["updates"] + loaded.trainer["step"] - 3
    assert set(loaded.moments) == {name for name, item in loaded.model.named_parameters() if item.requires_grad}


def test_a_segment_that_ended_in_a_pass_is_followed_by_the_rows_it_did_not_reach(tmp_path):
    house = House(tmp_path, rows=16, selection={"order": [0] * 8 + [1] * 8})
    more, visited, epochs = {}, [], []
    for name in ("first", "second", "third"):
        summary, work = train(tmp_path / name, house, epochs=0.5, evaluations=1, more=more)
        visited.append({row["example_id"] for row in work.rows("example_losses")})
        epochs.append(work.rows("curve")[-1]["epoch"])
        more = {"checkpoint": work.artifact("checkpoint")}
        if name == "second":
            assert summary.facts["phases"] == "2 of 2 begun"
    assert visited == [set(house.ids[:8]), set(house.ids[8:]), set(house.ids[:8])]
    assert epochs == [0.5, 1.0, 1.5]
    other = House(tmp_path / "other", rows=16, selection={"weight": [2.0] * 16})  # another selection begins anew
    _, work = train(tmp_path / "fourth", other, epochs=0.5, evaluations=1, more=more)
    assert work.rows("curve")[-1]["epoch"] == 0.5
    trainer = json.loads((work.artifact("checkpoint").folder / "trainer.json").read_text())
    assert sorted(trainer["visited"].values()) == [8, 24]


def test_full_can_follow_lora_and_lora_cannot_follow_full(tmp_path):
    lora = House(tmp_path / "lora", plan={"technique": {"method": "lora", "r": 4}})
    full = House(tmp_path / "full")
    _, adapters = train(tmp_path / "a", lora)
    summary, _ = train(tmp_path / "b", full, more={"checkpoint": adapters.artifact("checkpoint")})
    assert summary.facts["technique"] == "full"
    _, whole = train(tmp_path / "c", full)
    with pytest.raises(ConfigError, match="plan asks for"):
        train(tmp_path / "d", lora, more={"checkpoint": whole.artifact("checkpoint")})


@pytest.mark.parametrize(("closes", "decaying"), [(False, 4), (True, 10)])
def test_an_annealing_decision_decays_the_rate_at_the_segments_end_a_closing_one_all_along(tmp_path, closes, decaying):
    decision = Decision(action="anneal", reason="test", round=1, closes=closes)
    house = House(tmp_path, rows=40, decision=decision)
    _, work = train(tmp_path / "work", house, decay_share=0.4)
    curve = work.rows("curve")
    assert [row["phase"] for row in curve] == ["stable"] * (10 - decaying) + ["decay"] * decaying
    falling = [1 - step / decaying for step in range(decaying)]
    assert [row["learning_rate"] / 1e-2 for row in curve] == pytest.approx([1] * (10 - decaying) + falling)


def test_a_flops_limit_ends_the_segment_before_the_step_that_would_exceed_it(tmp_path):
    _, free = train(tmp_path / "free", House(tmp_path / "a", rows=40), evaluations=2)
    curve = free.rows("curve")
    one = free.ledger().by_cause()["eval"].flops // 2
    steps = [row["flops"] for row in curve]
    alone = [
        flops - one * sum(r["validation_loss"] is not None for r in curve[: i + 1]) for i, flops in enumerate(steps)
    ]
    limit = alone[5] + 2 * one
    for extra, expected in ((0, 6), (-1, 5), (1, 6)):
        decision = Decision(action="continue", reason="test", round=1, segment_flops=limit + extra)
        house = House(tmp_path / f"b{extra}", rows=40, decision=decision)
        _, work = train(tmp_path / f"w{extra}", house, evaluations=2)
        rows = work.rows("curve")
        assert len(rows) == expected
        assert rows[-1]["flops"] <= limit + extra
        assert rows[-1]["validation_loss"] is not None
    decision = Decision(action="continue", reason="test", round=1, segment_flops=10)
    with pytest.raises(BudgetError, match="0 steps"):
        train(tmp_path / "none", House(tmp_path / "c", rows=40, decision=decision))


def test_drop_last_with_too_few_rows_is_refused_before_the_model_is_read(tmp_path):
    house = House(tmp_path, rows=3, plan={"micro_batch": 4, "accumulation": 8})
    for path in (tmp_path / "model").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"0 steps: 3 rows < 4 x 8 = 32 per step with drop_last"):
        train(tmp_path / "work", house, drop_last=True)


def test_a_segment_whose_every_validation_is_not_finite_is_refused(tmp_path, monkeypatch):
    from stages.train import loop

    prepare = loop.prepare

    def broken_in_evaluation(job, device):
        start = prepare(job, device)
        start.model.model.norm.register_forward_hook(
            lambda module, inputs, out: out if module.training else out * math.nan
        )
        return start

    monkeypatch.setattr(loop, "prepare", broken_in_evaluation)
    work = work_for(STAGE, tmp_path / "work", seed=3)
    with pytest.raises(ModelError, match="finite validation loss"):
        STAGE.run(slice_of(), House(tmp_path, rows=12).inputs(), work)
    assert work.opened == []


def test_a_selected_example_without_tokens_is_refused(tmp_path):
    house = House(tmp_path, rows=6)
    other = LocalWork(tmp_path / "other", {"tokens": "tokens"})
    other.table("tokens", token_columns(6, 9))
    with pytest.raises(InputError, match=house.ids[0]):
        train(tmp_path / "work", house, more={"tokens": other.artifact("tokens")})


def test_an_empty_validation_is_refused(tmp_path):
    house = House(tmp_path, rows=6)
    other = LocalWork(tmp_path / "other", {"validation_tokens": "tokens"})
    other.table("validation_tokens", token_columns(0, 9))
    with pytest.raises(InputError, match="validation"):
        train(tmp_path / "work", house, more={"validation_tokens": other.artifact("validation_tokens")})


def test_a_policy_may_end_a_segment_and_says_why(tmp_path):
    house = House(tmp_path, rows=40)
    config = TrainSlice(
        seed=3,
        train=TrainConfig(learning_rate=0.5, warmup_steps=0, epochs=3.0, evaluations=15),
        govern=GovernConfig(policy={"method": "patience"}),
    )
    work = work_for(STAGE, tmp_path / "work", seed=3)
    summary = STAGE.run(config, house.inputs(), work)
    curve = work.rows("curve")
    assert len(curve) < 30
    assert curve[-1]["validation_loss"] is not None
    assert summary.facts["ended"] != "all planned steps were made"
    choices = read_table(work.measured("curve", "choices.arrow")).to_pylist()
    evaluated = [
        row["step"] for row in work.artifact("curve").table().to_pylist() if row["validation_loss"] is not None
    ]
    assert [row["step"] for row in choices] == evaluated
    assert [row["action"] for row in choices] == ["continue"] * (len(choices) - 1) + ["end"]
    assert choices[-1]["reason"] == summary.facts["ended"]


def test_the_warm_up_draws_its_rows_from_the_seed_and_measures_the_base(tmp_path):
    house = House(tmp_path, rows=40)
    config = BeginSlice.model_validate(
        {"seed": 3, "begin": {"fraction": 0.25}, "train": {"warmup_steps": 4, "learning_rate": 1e-2, "drop_last": True}}
    )
    runs = []
    for name in ("first", "second"):
        work = work_for(BEGIN, tmp_path / name, seed=3)
        BEGIN.run(config, house.begin_inputs(), work)
        runs.append(work)
    work = runs[0]
    assert [run.artifact("selection").ref.digest for run in runs] == [work.artifact("selection").ref.digest] * 2
    chosen = work.rows("selection")
    assert len(chosen) == 10
    assert {row["example_id"] for row in chosen} <= set(house.ids)
    curve = work.rows("curve")
    assert [row["step"] for row in curve] == [0, 1, 2, 3]
    assert curve[0]["train_loss"] is None
    assert [row["learning_rate"] / 1e-2 for row in curve[1:]] == pytest.approx([0.25, 0.5, 0.75])
    assert set(work.ledger().by_cause()) == {"warm_up", "eval"}
    base = load_merged(None, house.pin)
    table = TokenTable(house.artifacts["validation_tokens"].folder)
    rows = [table.row(index) for index in range(len(table))]
    from stages.model.loss import document_losses

    with torch.no_grad():
        loss_D, tokens_D = document_losses(base, collate(rows))
    assert curve[0]["validation_loss"] == pytest.approx(float(loss_D.sum() / tokens_D.sum()), rel=1e-5)
    moments = load_file(work.artifact("checkpoint").folder / "optimizer.safetensors")
    assert any(float(value.abs().max()) > 0 for value in moments.values())
    assert len(moments) == 2 * len(dict(base.named_parameters()))


def test_a_warm_up_takes_at_least_the_least_rows_and_at_most_the_pool(tmp_path):
    house = House(tmp_path, rows=6)
    for fraction, least, expected in ((0.05, 4, 4), (0.05, 100, 6), (1.0, 1, 6)):
        work = work_for(BEGIN, tmp_path / f"{fraction}-{least}", seed=1)
        config = BeginSlice.model_validate(
            {"seed": 1, "begin": {"fraction": fraction, "least_rows": least}, "train": {}}
        )
        BEGIN.run(config, house.begin_inputs(), work)
        assert len(work.rows("selection")) == expected


def test_steps_that_are_not_finite_are_recorded_and_the_rest_goes_on(tmp_path, monkeypatch):
    from stages.technique import optimizer

    house, asked = House(tmp_path, rows=12), []
    step = optimizer.optimizer_step

    def broken(model, *args, **settings):
        asked.append(1)
        if len(asked) != 2:
            return step(model, *args, **settings)
        handle = model.model.norm.register_forward_hook(lambda module, inputs, out: out * math.nan)
        try:
            return step(model, *args, **settings)
        finally:
            handle.remove()

    monkeypatch.setattr(optimizer, "optimizer_step", broken)
    summary, work = train(tmp_path / "work", house)
    curve = work.rows("curve")
    assert [bool(np.isfinite(row["train_loss"])) for row in curve] == [True, False, True]
    assert math.isnan(curve[1]["gradient_norm"])
    assert curve[1]["validation_loss"] == curve[0]["validation_loss"]
    assert summary.facts["steps_not_applied"] == 1
    assert "2" in work.notices[0]
    assert json.loads((work.artifact("checkpoint").folder / "trainer.json").read_text())["updates"] == 2


def _greedy(monkeypatch, most_rows: int) -> None:
    """Let the model's forward pass in training ask the allocator for too much where a batch has more rows."""
    from stages.train import loop

    real = loop.prepare

    def prepare(job, device):
        start = real(job, device)

        def ask(module, arguments):
            if module.training and len(arguments[0]) > most_rows:
                torch.empty(2**60)

        start.model.model.embed_tokens.register_forward_pre_hook(ask)
        return start

    monkeypatch.setattr(loop, "prepare", prepare)


def test_where_memory_runs_out_micro_batches_are_halved_and_what_is_learnt_stays(tmp_path, monkeypatch):
    plan = {"micro_batch": 4, "accumulation": 1}
    house = House(tmp_path, rows=12, plan=plan)
    _, expected = train(tmp_path / "free", house)
    _greedy(monkeypatch, 1)
    summary, work = train(tmp_path / "short", house)
    assert summary.facts["micro_batch_halved_before_steps"] == "1, 1"
    assert "micro-batches hold 1 rows" in work.notices[0]
    assert [row["step"] for row in work.rows("curve")] == [1, 2, 3]
    for name, column in (("curve", "train_loss"), ("example_losses", "loss_sum")):
        assert [row[column] for row in work.rows(name)] == pytest.approx(
            [row[column] for row in expected.rows(name)], rel=1e-3
        )
    assert summary.measured["peak_over_predicted"] > 0
    uses = [json.loads(each.measured("curve", "memory.json").read_text()) for each in (expected, work)]
    assert [use["ran_out"] for use in uses] == [False, True]
    assert uses[1]["predicted_bytes"] == 1
    assert uses[1]["measured_bytes"] == max(
        row["peak_bytes"]
        for row in read_table(work.measured("curve", "timing.arrow")).to_pylist()
        if row["what"] == "step"
    )


def test_a_row_that_alone_needs_too_much_memory_is_told(tmp_path, monkeypatch):
    _greedy(monkeypatch, 0)
    house = House(tmp_path, rows=12, plan={"micro_batch": 4, "accumulation": 1})
    with pytest.raises(BudgetError, match="1 row"):
        train(tmp_path / "work", house)


def test_a_step_in_8_bits_with_updates_inside_and_the_head_in_parts_is_trained_and_resumed(tmp_path):
    pytest.importorskip("bitsandbytes")
    plan = {"micro_batch": 4, "accumulation": 1, "optimizer_states": "8bit", "update_in_backward": True,
            "loss_chunks": 3, "recomputed_blocks": (0,)}  # fmt: skip
    plain, found = ([row["train_loss"] for row in train(tmp_path / name, House(tmp_path / f"{name}h", rows=12, plan=more))[1].rows("curve")]
                    for name, more in (("a", {"micro_batch": 4, "accumulation": 1}), ("b", plan)))  # fmt: skip
    assert found == pytest.approx(plain, rel=2e-2)
    costs = [train(tmp_path / f"{name}2", House(tmp_path / f"{name}2h", rows=12, plan=more))[1].ledger().by_cause()["train"].flops
             for name, more in (("c", {"micro_batch": 4, "accumulation": 1}), ("d", {"micro_batch": 4, "accumulation": 1, "update_in_backward": True}))]  # fmt: skip
    assert costs[1] == 2 * costs[0]


@pytest.mark.skipif(not reset_peak(), reason="this system does not let a process reset its high-water mark")
def test_what_was_held_before_a_segment_is_not_taken_for_its_peak(tmp_path):
    house = House(tmp_path, rows=4)
    before = np.ones(2**28 // 8)
    del before
    assert peak_resident_bytes() > resident_bytes() + 2**27
    summary, _ = train(tmp_path / "work", house, evaluations=1)
    assert summary.measured["peak_bytes"] < resident_bytes() + 2**27
