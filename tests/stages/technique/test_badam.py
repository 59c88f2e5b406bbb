"""BAdam: what trains when, against torch's AdamW run by hand, and the bytes of its state."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from data_contracts.config import TrainConfig
from stages.model.batch import collate
from stages.technique.blocks import layer_blocks
from stages.technique.step import trainable
from tests.stages.technique.setting import llama, pinned, started, technique, windows
from tests.stages.technique.test_step import by_hand, rows_of


@pytest.fixture(scope="module")
def pin(tmp_path_factory):
    return pinned(tmp_path_factory.mktemp("models") / "three", 3)


def test_each_layer_trains_alone_for_its_steps_as_torchs_adamw_would_train_it():
    """The first block has all its steps, and moments start anew at every block (both faults of public code)."""
    ours, theirs, rows = llama(seed=1), llama(seed=1), rows_of(6)
    method = technique("badam", block_steps=3, order="ascending")
    optimizer = method.optimizer(method.wrap(ours).train(), TrainConfig(), 1e-2, 0)
    for layer in (0, 1, 2, 0):
        theirs.requires_grad_(False)
        theirs.model.layers[layer].requires_grad_(True)
        reference = torch.optim.AdamW(trainable(theirs).values(), lr=1e-2, weight_decay=0.0)
        for _ in range(3):
            optimizer.step([collate(rows[:2]), collate(rows[2:])], 1e-2, clip=1.0)
            assert {int(name.split(".")[2]) for name in trainable(ours)} == {layer}
            _, grads = by_hand(theirs, rows)
            for name, parameter in trainable(theirs).items():
                parameter.grad = grads[name]
            torch.nn.utils.clip_grad_norm_(trainable(theirs).values(), 1.0)
            reference.step()
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-5)
    assert torch.equal(ours.get_input_embeddings().weight, llama(seed=1).get_input_embeddings().weight)


def test_the_state_is_eight_bytes_a_parameter_of_one_layer(pin):
    """With k layers alike, 1/k of what AdamW over all layers holds."""
    optimizer = started(technique("badam", block_steps=1), pin)
    layers = [sum(item.numel() for item in layer.parameters()) for layer in optimizer.model.model.layers]
    for window in windows(4):
        optimizer.step(window, 1e-3, clip=1.0)
        held = sum(value.nbytes for value in optimizer.tensors().values())
        assert held == 8 * layers[optimizer.block] == 8 * sum(layers) // 3
        live = [item for state in optimizer.adamw.state.values() for item in state.values() if item.numel() > 1]
        assert sum(item.nbytes for item in live) == held
    assert technique("badam").trainable_count(optimizer.model) == layers[0]


def test_every_cycle_visits_each_layer_once_in_an_order_of_its_own():
    method = technique("badam", block_steps=2)
    optimizer = method.optimizer(method.wrap(llama(6)), TrainConfig(), 1e-2, 3)
    orders = [[optimizer.schedule.block(6 * cycle + place) for place in range(6)] for cycle in range(4)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    other = technique("badam").optimizer(method.wrap(llama(6)), TrainConfig(), 1e-2, 4)
    assert orders != [[other.schedule.block(6 * cycle + place) for place in range(6)] for cycle in range(4)]


def test_layer_one_is_not_layers_ten_to_nineteen():
    blocks = layer_blocks(llama(12))
    assert len(blocks) == 12
    assert {name.split(".")[2] for name in blocks[1]} == {"1"}
    assert len({name for block in blocks for name in block}) == sum(map(len, blocks))


def test_vectors_do_not_decay(pin):
    optimizer = started(technique("badam"), pin)
    decays = {id(item): group["weight_decay"] for group in optimizer.adamw.param_groups for item in group["params"]}
    for name, parameter in trainable(optimizer.model).items():
        assert decays[id(parameter)] == (0.0 if "norm" in name else 0.1), name


def test_its_state_is_plain_json_and_a_step_that_is_not_finite_still_counts_as_a_window(pin):
    optimizer = started(technique("badam", block_steps=2), pin)
    handle = optimizer.model.model.norm.register_forward_hook(lambda module, inputs, out: out * np.nan)
    result = optimizer.step(windows(1)[0], 1e-3, clip=1.0)
    handle.remove()
    assert not result.applied
    assert json.loads(json.dumps(optimizer.plain())) == {"windows": 1, "updates": 0, "seed": 7, "period": 0}
