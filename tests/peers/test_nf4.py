"""Forward-only influence on a base that bitsandbytes holds in four bits, against float64 gradients of what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from data_contracts.config import ModelConfig
from data_contracts.errors import MethodError
from stages.model import nf4
from stages.model.checkpoint import load_checkpoint, save_checkpoint
from stages.model.load import load_model, pin_model
from stages.model.nf4 import Nf4Linear, hold_in_nf4
from stages.technique.methods.lora import Lora
from tests.local_work import LocalWork
from tests.stages.gradients.small_models import rows_of
from tests.stages.gradients.test_inner_product import explicit_gradient
from tests.stages.score.setting import ADAM, Setting, make_setting

bitsandbytes: Any = pytest.importorskip("bitsandbytes", reason="bitsandbytes is absent: pip install .[peers]")


def lora_setting(folder: Path) -> Setting:
    """The tiny setting with a LoRA checkpoint that has moved and has moments."""
    setting = make_setting(folder)
    torch.manual_seed(0)
    model = Lora(r=3, alpha=6).wrap(load_model(setting.pin))
    moments = {}
    for name, value in model.named_parameters():
        if value.requires_grad:
            value.data = torch.randn_like(value) * 0.2
            moments[name] = (torch.zeros_like(value), torch.rand_like(value) * 1e-3 + 1e-7)
    work = LocalWork(folder / "checkpoint", {"c": "checkpoint"})
    trainer = {
        "technique": {"method": "lora", "r": 3, "alpha": 6},
        "step": 4,
        "learning_rate": 1e-4,
        **ADAM,
        "updates": 4,
    }
    save_checkpoint(work.path("c"), model, setting.pin, moments, trainer)
    setting.inputs["checkpoint"] = work.artifact("c")
    return setting


def dequantised(setting: Setting) -> Any:
    """Return the checkpoint in float64 with the weights that four bits hold, and its moments."""
    held = load_checkpoint(setting.inputs["checkpoint"].folder, setting.pin)
    assert hold_in_nf4(held.model) == 14
    exact = load_checkpoint(setting.inputs["checkpoint"].folder, setting.pin, dtype=torch.float64)
    layers = dict(exact.model.named_modules())
    for name, module in held.model.named_modules():
        if isinstance(module, Nf4Linear):
            weight = bitsandbytes.functional.dequantize_4bit(
                *bitsandbytes.functional.quantize_4bit(
                    layers[name].weight.float(), quant_type="nf4", compress_statistics=True
                )
            )
            assert isinstance(layers[name], nn.Linear)
            assert not torch.allclose(layers[name].weight.float(), weight, atol=1e-3)
            layers[name].weight.data = weight.double().reshape(layers[name].weight.shape)
    return exact


@pytest.mark.parametrize("difference", ["central", "one_sided"])
def test_it_ranks_as_float64_gradients_of_the_dequantised_model(tmp_path: Path, difference: str) -> None:
    setting = lora_setting(tmp_path)
    scorer = {"method": "influence_forward", "frozen": "nf4", "difference": difference}
    work, summary = setting.score(scorer=scorer)
    found = np.array([row["score"] for row in work.rows("scores")])
    exact = dequantised(setting)
    pool, target = (
        [explicit_gradient(exact.model, row) for row in rows] for rows in (rows_of(24, seed=1), rows_of(6, seed=2))
    )
    expected = np.zeros(24)
    for name, (_, square) in exact.moments.items():
        mean = sum(gradient[name] / tokens for gradient, _, tokens in target) / 6
        root = torch.sqrt(square.double() / (1 - ADAM["beta2"] ** 4)) + ADAM["epsilon"]
        expected += [float((gradient[name] * mean / root).sum()) for gradient, _, _ in pool]
    assert summary.facts["layers_in_nf4"] == 14
    assert spearmanr(found, expected).statistic > 0.99
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
    floating = setting.scores("float", scorer={"method": "influence_forward"})
    other = np.array([row["score"] for row in floating.values()])
    assert np.abs(other - expected).max() > 0.05 * np.abs(expected).max()  # four bits are seen


def test_frozen_weights_take_an_eighth_of_their_memory(shared: Path) -> None:
    pin = pin_model(ModelConfig(path="stories260k"), shared / "data")
    model = Lora().wrap(load_model(pin))
    before = {n: m.weight.nbytes for n, m in model.named_modules() if isinstance(m, nn.Linear) and "base_layer" in n}
    hold_in_nf4(model)
    held = {n: m.codes.nbytes for n, m in model.named_modules() if isinstance(m, Nf4Linear)}
    assert set(held) == set(before)
    assert sum(held.values()) == sum(before.values()) // 8


def test_a_model_that_trains_whole_and_an_absent_library_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(make_setting(tmp_path).pin).requires_grad_(True)
    with pytest.raises(MethodError, match="all of its linear layers train"):
        hold_in_nf4(model)
    monkeypatch.setattr(nf4, "find_spec", lambda name: None)
    with pytest.raises(MethodError, match="bitsandbytes is installed"):
        hold_in_nf4(model)
