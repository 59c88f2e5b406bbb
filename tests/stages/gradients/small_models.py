"""Small random models in float64 and rows of unequal lengths, for oracles."""

from __future__ import annotations

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from stages.model.batch import Row

VOCABULARY = 61


def tiny_llama(*, tied: bool = True, seed: int = 0, pad: int | None = None, exact: bool = True) -> LlamaForCausalLM:
    """Return a 2-layer Llama; `exact` swaps its norm, which rounds to float32 inside, for torch's in float64."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=pad,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    if exact:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, LlamaRMSNorm):
                    norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
                    norm.weight.data.uniform_(0.5, 1.5)
                    setattr(module, name, norm)
    return model.double().eval()


def tiny_qwen3(seed: int = 0) -> Qwen3ForCausalLM:
    """Return a 2-layer Qwen3: queries and keys of each head are normed; torch's norm in float64 for its own."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Qwen3RMSNorm):
                norm = nn.RMSNorm(len(child.weight), eps=config.rms_norm_eps)
                norm.weight.data.uniform_(0.5, 1.5)
                setattr(module, name, norm)
    return model.double().eval()


def tiny_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """Return a 2-layer GPT-2: learned positions, Conv1D layers, LayerNorm with bias, tied head."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=12, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    return GPT2LMHeadModel(config).double().eval()


def with_lora(model: nn.Module, seed: int = 1, *, embedding: bool = False) -> nn.Module:
    """Wrap with LoRA on attention and MLP; B is random, not zero, so that A has a gradient."""
    torch.manual_seed(seed)
    wrapped = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float64) * 0.3
    wrapped.get_input_embeddings().requires_grad_(embedding)
    return wrapped.eval()


def rows_of(count: int, *, seed: int = 0, longest: int = 17, shortest: int = 3) -> list[Row]:
    """Return rows of unequal lengths with answers that are not only at the end."""
    random = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(random.integers(shortest, longest + 1))
        answer = random.random(length) < 0.5
        answer[-1] = True
        rows.append(Row(f"{seed:02d}-{index:04d}", random.integers(0, VOCABULARY, length), answer))
    return rows
