"""GGUF: a Llama written with the format's own writer, read back, and held against transformers' reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from data_contracts.config import ModelConfig
from data_contracts.errors import ModelError
from stages.model.gguf_header import read_gguf_header
from stages.model.gguf_weights import NAMES
from stages.model.load import config_of, load_model, pin_model

pytestmark = pytest.mark.shared
KINDS = [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16]


def write(path: Path, model: Any, kind: gguf.GGMLQuantizationType) -> dict[str, np.ndarray]:
    """Write `model` as llama.cpp's converter does; return the dequantised weights by transformers' names."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(config.vocab_size - 3))]
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([2, 3, 3] + [1] * (len(words) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    back, expected = {value: key for key, value in NAMES.items()}, {}
    for name, item in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        parts = name.removesuffix(".weight").split(".")
        prefix, rest = ("", name.removesuffix(".weight"))
        if parts[1] == "layers":
            prefix, rest = f"blk.{parts[2]}.", ".".join(parts[3:])
        value = item.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(parts[-1])
        if heads:  # llama.cpp, convert_hf_to_gguf: pairs of rotary coordinates stand next to each other
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        fits = value.ndim == 2 and value.shape[-1] % 32 == 0
        if fits:
            stored = gguf.quants.quantize(np.ascontiguousarray(value), kind)
            writer.add_tensor(f"{prefix}{back[rest]}.weight", stored, raw_dtype=kind)
            value = gguf.quants.dequantize(stored, kind)
        else:
            writer.add_tensor(f"{prefix}{back[rest]}.weight", np.ascontiguousarray(value))
        if heads:
            value = value.reshape(heads, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        expected[name] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_gguf_llama_has_the_weights_and_the_logits_it_was_written_from(
    kind: gguf.GGMLQuantizationType, model: Any, tmp_path: Path
) -> None:
    expected = write(tmp_path / "tiny.gguf", model, kind)
    pinned = pin_model(ModelConfig(path="."), tmp_path)
    assert (pinned.parameters, pinned.layers, pinned.vocabulary, pinned.tied_embeddings) == (260_032, 5, 512, True)
    found = load_model(pinned)
    state = found.state_dict()
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name].numpy(), value, err_msg=name)
    assert found.get_output_embeddings().weight is found.get_input_embeddings().weight
    assert found.config.rms_norm_eps == 1e-5
    assert config_of(pinned).to_dict() == {**found.config.to_dict(), "use_cache": True}
    again = type(model)(model.config).eval()
    again.load_state_dict({**{k: torch.from_numpy(v) for k, v in expected.items()}}, strict=False)
    ids = torch.arange(3, 60)[None]
    torch.testing.assert_close(found(input_ids=ids).logits, again(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def test_the_header_agrees_with_the_formats_own_reader(model: Any, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", model, KINDS[0])
    ours, theirs = read_gguf_header(tmp_path / "tiny.gguf"), gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert ours.shapes == {item.name: tuple(int(n) for n in reversed(item.shape)) for item in theirs.tensors}
    assert ours.places == {item.name: (int(item.tensor_type), int(item.data_offset)) for item in theirs.tensors}
    assert ours.metadata["tokenizer.ggml.tokens"] == 512
    assert ours.metadata["general.architecture"] == "llama"


def test_the_weights_are_those_that_transformers_reads(model: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write(tmp_path / "tiny.gguf", model, KINDS[0])
    found = load_model(pin_model(ModelConfig(path="."), tmp_path)).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    assert set(found) == set(theirs)
    for name, item in theirs.items():
        assert torch.equal(found[name], item), name


def test_a_file_that_is_not_gguf_or_is_cut_short_is_refused(model: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        pin_model(ModelConfig(path="."), tmp_path)
    write(tmp_path / "bad.gguf", model, KINDS[0])
    whole = (tmp_path / "bad.gguf").read_bytes()
    (tmp_path / "bad.gguf").write_bytes(whole[:-2000])
    with pytest.raises(ModelError, match="ends inside"):
        load_model(pin_model(ModelConfig(path="."), tmp_path))


def test_two_gguf_files_are_one_too_many(model: Any, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path / name, model, KINDS[0])
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        pin_model(ModelConfig(path="."), tmp_path)
