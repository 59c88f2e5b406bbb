"""Predicted bytes: against traces at full depth, and against what a real step really took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_contracts.config import ModelConfig, TrainConfig
from data_contracts.method import resolve
from data_contracts.records import ModelPin
from stages.model.batch import Row, collate
from stages.model.load import load_model, pin_model
from stages.model.loss import document_losses
from stages.plan.estimate import PROCESS_BYTES, Estimator
from stages.plan.trace import Shape, trace_flops, trace_step
from stages.technique.base import Technique

MIB = 2**20


def shape_of(method: str, *, precision: str = "float32", packed: bool = False, **savings: Any) -> Shape:
    return Shape(resolve(Technique, {"method": method}, "t"), precision, 64, 32, packed, **savings)


ALL = (0, 1, 2, 3, 4)
"""The blocks of stories260k."""


@pytest.mark.shared
@pytest.mark.parametrize(
    ("method", "savings", "choices"),
    [
        ("full", {}, [(0, 1), ALL]),
        ("lora", {"precision": "bfloat16"}, [(), (0, 1, 2)]),
        ("full", {"precision": "bfloat16", "loss_chunks": 8}, [(0, 1, 2)]),
        ("full", {"update_in_backward": True}, [(0, 1)]),
    ],
)
def test_pieces_of_shallow_traces_make_the_trace_of_full_size(
    pin: ModelPin, method: str, savings: dict[str, Any], choices: list[tuple[int, ...]]
) -> None:
    """To the byte, whichever blocks are recomputed."""
    shape = shape_of(method, **savings)
    estimator = Estimator(pin, TrainConfig(), "cpu")
    for chosen in choices:
        found = estimator.phases(shape, 7, 2, chosen)
        whole = trace_step(pin, shape, TrainConfig(), layers=pin.layers, rows=7, device="cpu", recomputed=chosen)
        for name, phase in found.items():
            assert phase.total - phase.process == whole.peak(name), (chosen, name)


@pytest.mark.shared
def test_a_block_recomputed_after_one_that_is_not_is_off_by_no_more_than_a_kernel_block(pin: ModelPin) -> None:
    shape = shape_of("full")
    found = Estimator(pin, TrainConfig(), "cpu").phases(shape, 7, 2, (1, 3))
    whole = trace_step(pin, shape, TrainConfig(), layers=pin.layers, rows=7, device="cpu", recomputed=(1, 3))
    assert all(abs(phase.total - phase.process - whole.peak(name)) <= 512 for name, phase in found.items())


@pytest.mark.shared
def test_operations_of_some_recomputed_blocks_are_those_of_a_trace_at_full_depth(pin: ModelPin) -> None:
    shape = shape_of("full")
    found = Estimator(pin, TrainConfig(), "cpu").flops(shape, (0, 1))
    assert found == trace_flops(pin, shape, layers=pin.layers, device="cpu", recomputed=(0, 1))
    assert found.train(1, 64) > Estimator(pin, TrainConfig(), "cpu").flops(shape).train(1, 64)


@pytest.mark.shared
def test_moments_in_8_bits_and_gradients_used_at_once_are_counted_from_the_shapes(pin: ModelPin) -> None:
    pytest.importorskip("bitsandbytes")
    estimator = Estimator(pin, TrainConfig(), "cpu")
    eight = estimator.phases(shape_of("full", optimizer_states="8bit"), 2, 2)["update"]
    matrices = [p.numel() for p in load_model(pin).parameters()]
    expected = sum(2 * n + 2 * 4 * -(-n // 256) if n >= 4096 else 8 * n for n in matrices)
    assert eight.moments == expected
    inside = estimator.phases(shape_of("full", update_in_backward=True), 8, 1)
    assert all(phase.gradients < 2**12 for phase in inside.values())  # norms and losses, no gradient
    assert set(inside) == {"forward", "backward", "forward again", "backward again", "update"}


@pytest.mark.shared
def test_weights_moments_and_gradients_are_counted_from_the_shapes(pin: ModelPin) -> None:
    phases = Estimator(pin, TrainConfig(), "cpu").phases(shape_of("full"), 2, 2)
    buffers = 2 * 4 * 4  # rotary frequencies and their original, head_dim / 2 of them
    steps = 47 * 4  # AdamW's step counters, one a tensor
    for phase in phases.values():
        assert phase.weights == 260_032 * 4 + buffers
        assert phase.moments == 260_032 * 8 + steps
    assert phases["forward"].gradients == 0
    assert abs(phases["update"].gradients - 260_032 * 4) < 100
    lora = Estimator(pin, TrainConfig(), "cpu").phases(shape_of("lora"), 2, 2)
    count = resolve(Technique, {"method": "lora"}, "t").trainable_count(load_model(pin))
    assert 0 <= lora["update"].moments - count * 8 <= 100 * 4
    assert lora["forward"].weights == 260_032 * 4 + buffers + count * 4


@pytest.mark.shared
def test_influence_read_in_training_holds_one_more_number_a_parameter_and_what_is_formed_at_once(pin: ModelPin) -> None:
    with_it, without = (
        Estimator(pin, TrainConfig(influence=when), "cpu").phases(shape_of("full"), 2, 2) for when in ("segment", None)
    )
    for name, phase in with_it.items():
        assert abs(phase.total - without[name].total - 260_032 * 4 - 64 * MIB) <= 47 * 2  # AdamW's step counters


@pytest.mark.shared
def test_one_micro_batch_meets_no_earlier_gradients(pin: ModelPin) -> None:
    estimator = Estimator(pin, TrainConfig(), "cpu")
    one, two = estimator.phases(shape_of("full"), 4, 1), estimator.phases(shape_of("full"), 4, 2)
    assert set(one) == {"forward", "backward", "update"}
    assert two["forward again"].total >= one["forward"].total + 260_032 * 4


@pytest.mark.shared
def test_recomputation_and_lora_save_what_they_should(pin: ModelPin) -> None:
    estimator = Estimator(pin, TrainConfig(), "cpu")

    def peak(shape: Shape, recomputed: tuple[int, ...] = ()) -> int:
        return max(item.total - item.process for item in estimator.phases(shape, 8, 2, recomputed).values())

    assert peak(shape_of("full"), ALL) < 0.6 * peak(shape_of("full"))
    assert peak(shape_of("lora")) < peak(shape_of("full"))
    assert peak(shape_of("full", packed=True)) > peak(shape_of("full"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 20 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=9, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("llama20m")
    LlamaForCausalLM(config).save_pretrained(place)
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "recompute", "precision"),
    [
        ("full", False, "float32"),
        ("lora", True, "float32"),
    ],
)
def test_the_predicted_peak_is_what_a_real_step_takes(
    folder: Path, method: str, recompute: bool, precision: str
) -> None:
    """Within 10 % and 64 MiB of the resident memory that the step added to its process: the allocator's slack (seen: 47
    and 58 MiB) is not modelled. With the process counted in, the prediction is not below what was taken."""
    pinned = pin_model(ModelConfig(path=str(folder)), Path("/"))
    assert pinned.parameters == pytest.approx(17e6, rel=0.15)
    micro, tokens, answers = 4, 256, 128
    shape = Shape(resolve(Technique, {"method": method}, "t"), precision, tokens, answers, False)
    blocks = tuple(range(pinned.layers)) if recompute else ()
    phases = Estimator(pinned, TrainConfig(), "cpu").phases(shape, micro, 2, blocks)
    predicted = max(item.total - item.process for item in phases.values())
    arguments = [str(folder), method, "yes" if recompute else "no", *map(str, (micro, tokens, answers)), precision]
    found = measure(arguments)
    if not found["exact"]:
        pytest.skip("this system does not let a process reset its high-water mark")
    added = found["peak"] - found["before"]
    print(f"{method} {recompute} {precision}: predicted {predicted / MIB:.0f} MiB, measured {added / MIB:.0f} MiB")
    assert abs(predicted - added) <= 0.1 * predicted + 64 * MIB
    assert max(item.total for item in phases.values()) >= found["peak"]


def measure(arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.stages.plan.real_step", *arguments],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3], env={**os.environ},
    )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.shared
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_scoring_keeps_of_a_row_is_what_autograd_saves_of_it(pin: ModelPin, method: str) -> None:
    """Every tensor that one row's pass saves for its backward pass, weights aside, against the prediction."""
    shape = shape_of(method)
    technique = shape.technique
    count = technique.trainable_count(load_model(pin))
    found = Estimator(pin, TrainConfig(), "cpu").scoring(replace(shape, loss_chunks=8), count)
    model = technique.wrap(load_model(pin)).train()
    weights = {value.untyped_storage().data_ptr() for value in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Any] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    row = Row("r", np.arange(64) % 500, np.arange(64) >= 34)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss_D, _ = document_losses(model, collate([row]))
    bytes_kept = sum(item.untyped_storage().nbytes() for place, item in kept.items() if place not in weights)
    size = sum(value.numel() * 4 for value in model.parameters())
    activations = found["backward"] - PROCESS_BYTES["cpu"] - size - 4 * count
    assert loss_D.requires_grad
    assert 0.9 * bytes_kept < activations < 1.6 * bytes_kept
    moved = found["forward"] - PROCESS_BYTES["cpu"] - size
    assert 8 * count < moved < 8 * count + bytes_kept
