"""Pinning and loading: what is read, what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_contracts.config import ModelConfig
from data_contracts.errors import ArtifactError, ModelError
from data_contracts.records import ModelPin
from stages.model.load import config_of, empty_model, load_model, load_tokenizer, locate, pin_model

pytestmark = pytest.mark.shared


@pytest.fixture
def folder(shared: Path, tmp_path: Path) -> Path:
    """A copy of stories260k that a test may break."""
    copy = tmp_path / "model"
    shutil.copytree(shared / "data/stories260k", copy, copy_function=shutil.copyfile)
    return copy


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_pin_says_what_the_files_hold(pin: ModelPin, model: Any) -> None:
    assert pin.parameters == sum(item.numel() for item in model.parameters()) == 260_032
    assert (pin.layers, pin.hidden, pin.vocabulary, pin.longest, pin.tied_embeddings) == (5, 64, 512, 512, True)
    assert pin.architecture == "LlamaForCausalLM"
    assert pin.source == "stories260k"


def test_pinning_loads_no_torch(shared: Path) -> None:
    code = (
        "import sys, pathlib; from data_contracts.config import ModelConfig; from stages.model.load import pin_model;"
        f"pin_model(ModelConfig(path='data/stories260k'), pathlib.Path({str(shared)!r}));"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_digest_is_of_content_not_of_place(pin: ModelPin, folder: Path) -> None:
    moved = pin_model(ModelConfig(path=str(folder)), Path("/"))
    assert (moved.digest, moved.tokenizer_digest) == (pin.digest, pin.tokenizer_digest)
    edit(folder / "tokenizer_config.json", pad_token="<unk>")
    changed = pin_model(ModelConfig(path=str(folder)), Path("/"))
    assert changed.digest != pin.digest
    assert changed.tokenizer_digest != pin.tokenizer_digest


def test_a_file_changed_since_it_was_pinned_is_found(folder: Path) -> None:
    pinned = pin_model(ModelConfig(path="model"), folder.parent)
    assert locate(pinned) == folder
    payload = bytearray((folder / "model.safetensors").read_bytes())
    payload[-1] ^= 1
    (folder / "model.safetensors").write_bytes(payload)
    with pytest.raises(ArtifactError, match="changed"):
        locate(pinned)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match="gone"):
        locate(pinned)


def test_a_model_that_is_mounted_elsewhere_is_found_below_the_folder_of_models_and_verified(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = pin_model(ModelConfig(path="model"), folder.parent)
    (tmp_path / "elsewhere").mkdir()
    moved = folder.rename(tmp_path / "elsewhere" / "model")
    with pytest.raises(ArtifactError, match=f"{folder}.* is gone") as caught:
        locate(pinned)
    assert "LAZYTRAIN_MODELS" in caught.value.remedy
    monkeypatch.setenv("LAZYTRAIN_MODELS", str(moved.parent))
    assert locate(pinned) == moved
    edit(moved / "tokenizer_config.json", pad_token="<unk>")
    with pytest.raises(ArtifactError, match="changed"):
        locate(pinned)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model.bin\)"):
        pin_model(ModelConfig(path="model"), folder.parent)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_in_the_models_folder_is_refused(folder: Path, name: str) -> None:
    edit(folder / name, auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    with pytest.raises(ModelError, match="auto_map"):
        pin_model(ModelConfig(path="model"), folder.parent)


def test_another_kind_of_model_and_a_quantised_one_are_refused(folder: Path) -> None:
    edit(folder / "config.json", architectures=["BertModel"])
    with pytest.raises(ModelError, match="BertModel"):
        pin_model(ModelConfig(path="model"), folder.parent)
    edit(folder / "config.json", architectures=["LlamaForCausalLM"], quantization_config={"bits": 4})
    with pytest.raises(ModelError, match="quantization_config"):
        pin_model(ModelConfig(path="model"), folder.parent)


def test_a_missing_weight_is_an_error_not_a_random_number(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state.pop("model.layers.3.mlp.up_proj.weight")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.3\.mlp\.up_proj"):
        load_model(pin_model(ModelConfig(path="model"), folder.parent))


def test_a_truncated_file_and_a_missing_folder_are_named(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        pin_model(ModelConfig(path="model"), folder.parent)
    with pytest.raises(ModelError, match="is not"):
        pin_model(ModelConfig(path="nowhere"), folder.parent)


def test_a_hub_name_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="nobody/nothing in the local cache"):
        pin_model(ModelConfig(hub="nobody/nothing"), tmp_path)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", "https://huggingface.co/nobody/nothing, accept the licence"),
        (404, "RepoNotFound", "HF_TOKEN"),
    ],
)
def test_a_gated_or_missing_hub_model_tells_what_to_do(
    status: int, code: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import httpx
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    request = httpx.Request("GET", "https://huggingface.co/api/models/nobody/nothing")
    response = httpx.Response(status, headers={"X-Error-Code": code}, request=request)
    kind = GatedRepoError if code == "GatedRepo" else RepositoryNotFoundError

    def refuse(*_: Any, **__: Any) -> str:
        raise kind(f"{status} Client Error", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError) as caught:
        pin_model(ModelConfig(hub="nobody/nothing"), tmp_path)
    assert said in caught.value.remedy


def test_a_hub_model_is_taken_from_the_local_cache_by_commit(
    shared: Path, pin: ModelPin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "models--team--tiny"
    shutil.copytree(shared / "data/stories260k", home / "snapshots" / commit, copy_function=shutil.copyfile)
    (home / "refs").mkdir()
    (home / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    found = pin_model(ModelConfig(hub="team/tiny"), tmp_path)
    assert found.locator == f"hub:team/tiny@{commit}"
    assert found.source == "team/tiny"
    assert found.digest == pin.digest
    assert locate(found).name == commit


def test_the_empty_model_has_the_shapes_of_the_loaded_one(pin: ModelPin, model: Any) -> None:
    empty = empty_model(pin)
    assert {str(item.device) for item in empty.parameters()} == {"meta"}
    assert {name: item.shape for name, item in empty.named_parameters()} == {
        name: item.shape for name, item in model.named_parameters()
    }
    assert config_of(pin).num_hidden_layers == 5


def test_a_grown_embedding_has_the_mean_in_its_new_rows_and_stays_tied(shared: Path) -> None:
    folder = next((shared / "cases/files").glob("P02*")) / "model"
    pinned = pin_model(ModelConfig(path="."), folder, resize=True)
    assert (pinned.vocabulary, pinned.grown_vocabulary) == (260, 261)
    plain = load_model(pin_model(ModelConfig(path="."), folder))
    grown = load_model(pinned)
    weight = grown.get_input_embeddings().weight
    assert weight.shape == (261, 8)
    assert torch.equal(weight[:260], plain.get_input_embeddings().weight)
    torch.testing.assert_close(weight[260], plain.get_input_embeddings().weight.mean(dim=0))
    assert grown.get_output_embeddings().weight is weight
    assert torch.equal(load_model(pinned).get_input_embeddings().weight, weight)


def test_the_tokenizer_of_the_folder_is_loaded(pin: ModelPin) -> None:
    tokenizer = load_tokenizer(pin)
    assert tokenizer.decode(tokenizer("Once upon a time")["input_ids"], skip_special_tokens=True).strip() == (
        "Once upon a time"
    )
