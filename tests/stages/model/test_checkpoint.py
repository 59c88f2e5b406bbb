"""Checkpoints: what is stored comes back bit for bit, whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from data_contracts.canonical import file_sha256
from data_contracts.config import ModelConfig
from data_contracts.contract import FolderContract
from data_contracts.errors import ArtifactError
from data_contracts.records import CHECKPOINT, ModelPin
from stages.model import checkpoint as module
from stages.model.checkpoint import load_checkpoint, load_merged, merge_adapters, save_checkpoint
from stages.model.load import load_model, pin_model

pytestmark = pytest.mark.shared
IDS = torch.arange(3, 60)[None]
TRAINER = {"technique": {"method": "full"}, "step": 7, "tokens": 100, "learning_rate": 1e-4, "updates": 7}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained(pin: ModelPin) -> Any:
    model = load_model(pin)
    torch.manual_seed(0)
    with torch.no_grad():
        for item in model.parameters():
            item.add_(torch.randn_like(item), alpha=0.01)
    return model


def moments_for(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return {
        name: (torch.randn_like(item), torch.rand_like(item))
        for name, item in model.named_parameters()
        if item.requires_grad
    }


def adapted(pin: ModelPin, targets: list[str], dtype: torch.dtype = torch.float32) -> Any:
    """A LoRA model whose adapters are not zero."""
    torch.manual_seed(2)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(load_model(pin, dtype=dtype), config).eval()
    with torch.no_grad():
        for name, item in model.named_parameters():
            if "lora_" in name:
                item.copy_(torch.randn_like(item) * 0.1)
    return model


def test_a_full_checkpoint_comes_back_bit_for_bit_and_tied(pin: ModelPin, tmp_path: Path) -> None:
    model = trained(pin)
    moments = moments_for(model)
    save_checkpoint(tmp_path / "c", model, pin, moments, TRAINER)
    stored = load_file(tmp_path / "c/model.safetensors")
    assert "lm_head.weight" not in stored
    assert sum(item.numel() for item in stored.values()) == 260_032
    found = load_checkpoint(tmp_path / "c", pin)
    assert torch.equal(logits(found.model), logits(model))
    assert found.model.get_output_embeddings().weight is found.model.get_input_embeddings().weight
    assert found.trainer == {**TRAINER, "base_digest": pin.digest}
    assert set(found.moments) == set(moments)
    for name, (first, second) in moments.items():
        assert torch.equal(found.moments[name][0], first)
        assert torch.equal(found.moments[name][1], second)


def test_transformers_reads_a_full_checkpoint_by_itself(pin: ModelPin, tmp_path: Path) -> None:
    model = trained(pin)
    save_checkpoint(tmp_path / "c", model, pin, {}, TRAINER)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "c").eval()), logits(model))


def test_a_checkpoint_keeps_its_folder_contract_and_names_no_path(pin: ModelPin, tmp_path: Path) -> None:
    assert isinstance(CHECKPOINT, FolderContract)
    for name, model in (("full", trained(pin)), ("lora", adapted(pin, ["q_proj"]))):
        save_checkpoint(tmp_path / name, model, pin, moments_for(model), TRAINER)
        files = sorted(path.name for path in (tmp_path / name).iterdir())
        assert set(CHECKPOINT.needs) <= set(files)
        assert all(Path(file).suffix in CHECKPOINT.suffixes for file in files)
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(files)
        for path in (tmp_path / name).glob("*.json"):
            assert pin.locator not in path.read_text()
            assert str(tmp_path) not in path.read_text()


def test_adapters_alone_are_stored_and_come_back_with_their_moments(pin: ModelPin, tmp_path: Path) -> None:
    model = adapted(pin, ["q_proj", "v_proj"])
    moments = moments_for(model)
    assert moments
    save_checkpoint(tmp_path / "c", model, pin, moments, TRAINER)
    assert not (tmp_path / "c/model.safetensors").exists()
    found = load_checkpoint(tmp_path / "c", pin)
    assert torch.equal(logits(found.model), logits(model))
    names = {name for name, item in found.model.named_parameters() if item.requires_grad}
    assert names == set(moments) == set(found.moments)
    frozen = load_checkpoint(tmp_path / "c", pin, trainable=False)
    assert not any(item.requires_grad for item in frozen.model.parameters())


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["lm_head", "q_proj"], ["embed_tokens"]])
def test_a_merged_model_with_tied_embeddings_survives_saving_and_loading(
    pin: ModelPin, tmp_path: Path, targets: list[str]
) -> None:
    model = adapted(pin, targets, torch.float64)
    expected = logits(model)
    assert (expected - logits(load_model(pin, dtype=torch.float64))).abs().max() > 1e-3
    merged = merge_adapters(model)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-9, atol=1e-9)
    tied = targets == ["q_proj", "down_proj"]
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) == tied
    save_checkpoint(tmp_path / "c", merged, pin, {}, TRAINER)
    again = load_checkpoint(tmp_path / "c", pin, dtype=torch.float64).model
    assert torch.equal(logits(again), logits(merged))


def test_the_merged_model_of_an_adapter_checkpoint_computes_the_same(pin: ModelPin, tmp_path: Path) -> None:
    model = adapted(pin, ["q_proj", "up_proj"])
    save_checkpoint(tmp_path / "c", model, pin, moments_for(model), TRAINER)
    merged = load_merged(tmp_path / "c", pin)
    assert not hasattr(merged, "peft_config")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(load_merged(None, pin)), logits(load_model(pin)))


def test_an_untied_grown_vocabulary_comes_back(shared: Path, tmp_path: Path) -> None:
    folder = next((shared / "cases/files").glob("P02*")) / "model"
    pinned = pin_model(ModelConfig(path="."), folder, resize=True)
    model = trained(pinned)
    save_checkpoint(tmp_path / "c", model, pinned, {}, TRAINER)
    again = load_checkpoint(tmp_path / "c", pinned).model
    assert again.get_input_embeddings().weight.shape == (261, 8)
    assert torch.equal(logits(again), logits(model))


def test_a_save_that_fails_leaves_nothing(pin: ModelPin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_make_durable", full_disk)
    (tmp_path / "c").mkdir()
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path / "c", trained(pin), pin, {}, TRAINER)
    assert list((tmp_path / "c").iterdir()) == []
    monkeypatch.undo()
    save_checkpoint(tmp_path / "c", trained(pin), pin, {}, TRAINER)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    with pytest.raises(ArtifactError, match="holds files"):
        save_checkpoint(tmp_path / "c", trained(pin), pin, {}, TRAINER)


def test_a_checkpoint_of_another_base_and_a_cut_one_are_refused(pin: ModelPin, tmp_path: Path) -> None:
    model = trained(pin)
    save_checkpoint(tmp_path / "c", model, pin, moments_for(model), TRAINER)
    with pytest.raises(ArtifactError, match="trained from"):
        load_checkpoint(tmp_path / "c", pin.model_copy(update={"digest": "f" * 64}))
    whole = (tmp_path / "c/optimizer.safetensors").read_bytes()
    (tmp_path / "c/optimizer.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError, match=r"optimizer\.safetensors"):
        load_checkpoint(tmp_path / "c", pin)
    (tmp_path / "c/trainer.json").unlink()
    with pytest.raises(ArtifactError, match=r"trainer\.json"):
        load_checkpoint(tmp_path / "c", pin)


@pytest.mark.slow
def test_equal_adapters_are_equal_bytes_whatever_the_hash_seed(pin: ModelPin, tmp_path: Path) -> None:
    """PEFT keeps target names in a set, whose order follows the hash seed."""
    code = (
        "import sys, pathlib; from tests.stages.model.test_checkpoint import *;"
        "root, out = map(pathlib.Path, sys.argv[1:]);"
        "pin = pin_model(ModelConfig(path='.'), root);"
        "save_checkpoint(out, adapted(pin, ['q_proj','k_proj','v_proj','o_proj','up_proj']), pin, {}, TRAINER)"
    )
    digests = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        subprocess.run(
            [sys.executable, "-c", code, pin.locator, str(out)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])},
            check=True,
            capture_output=True,
        )
        digests.append({path.name: file_sha256(path) for path in out.iterdir()})
    assert digests[0] == digests[1]
    assert json.loads((tmp_path / "1/adapter_config.json").read_text())["base_model_name_or_path"] == "stories260k"
