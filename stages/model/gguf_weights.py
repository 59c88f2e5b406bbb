"""The weights of a GGUF Llama as a plain transformers model.

transformers can read GGUF too, but parses the vocabulary with every load (22 s against 3 s for 135M parameters) and
marks the result as quantised, so that it refuses to be saved. This reads the tensors by their place in the file and
dequantises with the format's own package. A test holds the two against each other, weight by weight.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_contracts.errors import ModelError
from stages.model.gguf_header import GgufHeader, read_gguf_header

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, PreTrainedModel

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.weight")


def llama_config(path: Path) -> LlamaConfig:
    """Return the config that the file's header describes. Raises `ModelError` for scaled rotary positions.

    The stored rms_norm_eps is a float32 (9.9999997e-06): it is read back as the decimal that was meant.
    """
    from transformers import LlamaConfig

    header = read_gguf_header(path)
    read = {key.removeprefix("llama."): value for key, value in header.metadata.items() if key.startswith("llama.")}
    if any(key.startswith("rope.scaling") for key in read) or "rope_freqs.weight" in header.shapes:
        raise ModelError("a GGUF Llama with plain rotary positions", f"{path.name} scales them", "give safetensors")
    heads = read["attention.head_count"]
    config = LlamaConfig(
        vocab_size=header.shapes["token_embd.weight"][0],
        hidden_size=read["embedding_length"],
        intermediate_size=read["feed_forward_length"],
        num_hidden_layers=read["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=read.get("attention.head_count_kv", heads),
        max_position_embeddings=read["context_length"],
        rms_norm_eps=float(f"{read['attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": read.get("rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in header.shapes,
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=header.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=header.metadata.get("tokenizer.ggml.padding_token_id"),
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


def load_llama(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the file's model with weights in `dtype`. Raises `ModelError` where tensors are missing or unknown."""
    import torch
    from transformers import LlamaForCausalLM

    config = llama_config(path)
    header = read_gguf_header(path)
    raw = np.memmap(path, mode="r", dtype=np.uint8)
    state = {}
    for name in header.shapes:
        weight = _weight(raw, header, name, path)
        if ".attn_q." in name:
            weight = _interleaved(weight, config.num_attention_heads)
        elif ".attn_k." in name:
            weight = _interleaved(weight, int(config.num_key_value_heads or config.num_attention_heads))
        state[_name(name, path)] = torch.from_numpy(np.ascontiguousarray(weight)).to(dtype)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        raise ModelError(
            "a GGUF file with every weight of a Llama and no other",
            f"{path.name} lacks {missing[:3]} and has {unexpected[:3]} besides",
            "download the file again",
        )
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are a buffer that no file holds
    converted: Any = model
    return converted.to(dtype)


def _name(name: str, path: Path) -> str:
    match = _TENSOR.fullmatch(name)
    if match is None or match[2] not in NAMES:
        raise ModelError("a GGUF file with the tensors of a Llama", f"{path.name} holds {name}", "give safetensors")
    ours = f"{NAMES[match[2]]}.weight"
    return ours if match[1] is None else f"model.layers.{match[1]}.{ours}"


def _weight(raw: np.ndarray, header: GgufHeader, name: str, path: Path) -> np.ndarray:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind, start = header.places[name]
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    shape = header.shapes[name]
    size = int(np.prod(shape)) // block * block_bytes
    if start + size > len(raw):
        raise ModelError("a whole GGUF file", f"{path.name} ends inside {name}", "download the file again")
    data = raw[start : start + size].reshape(*shape[:-1], -1)
    if GGMLQuantizationType(kind) is GGMLQuantizationType.F32:
        return data.view(np.float32).reshape(shape).copy()
    return dequantize(data, GGMLQuantizationType(kind)).reshape(shape)


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo the file's order of rotary pairs: (2i, 2i+1) next to each other there, (i, i + half) in transformers."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
