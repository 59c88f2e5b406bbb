"""HiFT and LISA: whose turn it is, at which rate, and which moments stand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory_steps import measured
from data_contracts.config import TrainConfig
from data_contracts.errors import ConfigError
from stages.plan.estimate import Estimator
from stages.plan.trace import Shape
from stages.technique import offload
from stages.technique.blocks import all_blocks, size_of
from stages.technique.step import optimizer_step, trainable
from tests.stages.technique.setting import llama, pinned, technique, windows
from tests.stages.train.small import llama as small


def begun(method, depth=3, **settings):
    chosen = technique(method, **settings)
    return chosen.optimizer(chosen.wrap(llama(depth)).train(), TrainConfig(), 1e-2, 5)


def place(name):
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else parts[1]


def test_hifts_groups_take_turns_step_by_step_and_a_last_norm_wastes_no_turn():
    optimizer, seen = begun("hift"), []
    for window in windows(8):
        optimizer.step(window, 1e-2, clip=1.0)
        seen.append({place(name) for name in trainable(optimizer.model)})
    assert seen == [{"embed_tokens"}, {0}, {1}, {2, "norm"}] * 2


def test_blocks_of_everything_hold_every_weight_once_and_a_head_of_its_own_has_a_turn():
    for tied, count in ((True, 3), (False, 4)):
        model = small(tied=tied)
        blocks = all_blocks(model)
        assert len(blocks) == count
        held = [id(item) for block in blocks for item in block.values()]
        assert sorted(held) == sorted(map(id, model.parameters()))
    assert {place(name) for name in blocks[-1] if name != "lm_head.weight"} == {"norm"}


def test_badams_embeddings_take_a_turn_where_asked_for():
    optimizer, seen = begun("badam", embeddings=True, block_steps=2, order="ascending"), []
    for window in windows(8):
        optimizer.step(window, 1e-2, clip=1.0)
        seen.append({place(name) for name in trainable(optimizer.model)})
    assert seen == [item for item in ({"embed_tokens"}, {0}, {1}, {2, "norm"}) for _ in range(2)]
    method = technique("badam", embeddings=True)
    assert method.trainable_count(llama(3)) == max(map(size_of, all_blocks(llama(3))))


def test_hift_is_adamw_on_each_group_with_moments_that_are_not_forgotten():
    ours, theirs = begun("hift"), llama(3).train()
    groups = [[dict(theirs.named_parameters())[name] for name in group] for group in ours.blocks]
    references = [torch.optim.AdamW(group, lr=1e-2, weight_decay=0.0) for group in groups]
    for number, window in enumerate(windows(8)):
        theirs.requires_grad_(False)
        for item in groups[number % 4]:
            item.requires_grad_(True)
        optimizer_step(theirs, references[number % 4], window, clip=1.0)
        ours.step(window, 1e-2, clip=1.0)
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert ours.plain()["counts"] == [2] * 4


@pytest.mark.parametrize("layers", [1, 2])
def test_hifts_device_holds_moments_of_one_group_alone_and_main_memory_those_of_all(layers):
    """Of k groups of layers 1/k of what AdamW over all of them holds; the norm is the highest one's."""
    optimizer = begun("hift", depth=4, layers=layers)
    weights = [size_of(block) for block in optimizer.blocks]
    norm = llama(4).model.norm.weight.numel()
    assert [*weights[1:-1], weights[-1] - norm] == [(sum(weights[1:]) - norm) * layers // 4] * (4 // layers)
    for window in windows(2 * len(weights)):
        optimizer.step(window, 1e-3, clip=1.0)
        live = [item for state in optimizer.adamw.state.values() for item in state.values() if item.numel() > 1]
        assert sum(item.nbytes for item in live) == 8 * weights[optimizer.block]
    assert sum(value.nbytes for value in optimizer.tensors().values()) == 8 * sum(weights)


@pytest.mark.parametrize(("method", "layers"), [("hift", 1), ("hift", 2), ("badam", 2)])
def test_a_real_step_takes_the_bytes_that_are_planned(tmp_path, monkeypatch, method, layers):
    monkeypatch.setattr(offload, "room", offload.room)  # the benchmark puts its own there
    pin = pinned(tmp_path / "five", 5, 64)
    shape = Shape(technique(method, layers=layers), "float32", 24, 10, False)
    phases = Estimator(pin, TrainConfig(), "cpu").phases(shape, 3, 2)
    planned = max(phase.total - phase.process for name, phase in phases.items() if name != "load")
    assert abs(planned - measured(pin, shape, 3, 2, ())["bytes"]) <= 512


def test_hifts_rate_changes_once_a_cycle():
    optimizer, seen = begun("hift"), []
    for number, window in enumerate(windows(9)):
        optimizer.step(window, 1e-3 * (number + 1), clip=1.0)
        seen.append(optimizer.adamw.param_groups[0]["lr"])
    assert seen == [1e-3] * 4 + [5e-3] * 4 + [1e-3 * 9]


def test_lisa_refuses_to_draw_more_layers_than_there_are():
    with pytest.raises(ConfigError, match="1000 are to train at a time and the model has 3"):
        technique("lisa", layers=1000).wrap(llama(3))


def test_lisa_trains_what_lies_outside_always_and_drops_the_moments_of_layers():
    """Kept, the moments of layers that were drawn once would grow to those of full training."""
    method, drawn = technique("lisa", layers=2, block_steps=2), set()
    optimizer = method.optimizer(method.wrap(llama(6)).train(), TrainConfig(), 1e-2, 5)
    for number, window in enumerate(windows(12)):
        optimizer.step(window, 1e-2, clip=1.0)
        here = {place(name) for name in trainable(optimizer.model)}
        layers = {item for item in here if isinstance(item, int)}
        assert here - layers == {"embed_tokens", "norm"}
        assert len(layers) == 2
        drawn.add(tuple(sorted(layers)))
        held = sum(value.nbytes for value in optimizer.tensors().values())
        assert held == 8 * sum(item.numel() for item in trainable(optimizer.model).values())
        assert optimizer.updates == number + 1
        assert optimizer.layer_updates == number % 2 + 1
        norm = optimizer.model.model.norm.weight
        assert optimizer.adamw.state[norm]["step"] == number + 1
    assert len(drawn) > 2
