"""What `benchmarks.memory` measures: random models of two sizes, and every technique and saving on them.

The same models and shapes serve other benchmarks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_contracts.records import ModelPin
    from stages.plan.trace import Shape

SIZES: dict[str, dict[str, Any]] = {
    "3M": {"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 5},
    "20M": {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
}
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
MICRO_BATCH, TOKENS, ANSWERS, WINDOW = 4, 128, 64, 8


def llama(folder: Path, **sizes: int) -> ModelPin:
    """Write a random Llama of these sizes and pin it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from data_contracts.config import ModelConfig
    from stages.model.load import pin_model

    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**{**heads, "max_position_embeddings": 512, **sizes})).save_pretrained(folder)
    return pin_model(ModelConfig(path=str(folder)), Path("/"))


def shape_8b(folder: Path) -> ModelPin:
    """Pin Llama-3.1-8B's shape: a plan reads no weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from data_contracts.canonical import file_sha256
    from data_contracts.records import FileEntry, ModelPin

    LlamaConfig(**LLAMA_8B, tie_word_embeddings=False, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    path = folder / "config.json"
    entry = FileEntry(path=path.name, bytes=path.stat().st_size, sha256=file_sha256(path))
    return ModelPin(source="llama-3.1-8b", locator=str(folder), digest="0" * 64, architecture="LlamaForCausalLM",
                    parameters=8_030_261_248, layers=32, hidden=4096, vocabulary=128256, tied_embeddings=False,
                    longest=131072, tokenizer_digest="0" * 64, files=(entry,))  # fmt: skip


VARIANTS: tuple[dict[str, Any], ...] = (
    {"method": "lora", "embeddings": True}, {"method": "badam", "embeddings": True}, {"method": "hift", "layers": 2},
    {"method": "hybrid", "embeddings": True},
)  # fmt: skip
"""Techniques whose settings change what trains at once."""


def shape_of(method: str, settings: dict[str, Any] | None = None, **more: Any) -> Shape:
    """Return the shape of the rows measured here."""
    from data_contracts.method import resolve
    from stages.plan.trace import Shape
    from stages.technique.base import Technique

    technique = resolve(Technique, {"method": method} | (settings or {}), "technique")
    return Shape(technique, more.pop("precision", "float32"), TOKENS, ANSWERS, False, **more)


def cases(layers: int) -> list[tuple[Shape, int, int, tuple[int, ...]]]:
    """Return (shape, micro-batch, accumulation, recomputed blocks) of every technique and saving."""
    from data_contracts.method import names
    from stages.technique.base import Technique

    some, every = tuple(range(layers // 2)), tuple(range(layers))
    found = [
        (shape_of(name), MICRO_BATCH, 2, blocks)
        for name in names(Technique)
        for blocks in ((), every)
        if not blocks or "recompute" in shape_of(name).technique.savings
    ]  # of others no plan recomputes any
    found += [(shape_of(each["method"], each), MICRO_BATCH, 2, blocks) for each in VARIANTS for blocks in ((), every)]
    for name in ("full", "lora"):
        found += [
            (shape_of(name), MICRO_BATCH, 2, some),
            (shape_of(name, precision="bfloat16"), MICRO_BATCH, 2, some),
            (shape_of(name, loss_chunks=8), MICRO_BATCH, 2, every),
            (shape_of(name, update_in_backward=True), WINDOW, 1, ()),
            (shape_of(name, optimizer_states="8bit"), MICRO_BATCH, 2, ()),
            (shape_of(name, optimizer_states="8bit", loss_chunks=8, update_in_backward=True), WINDOW, 1, every),
            (shape_of(name, offload_activations=True), MICRO_BATCH, 2, ()),
            (shape_of(name, optimizer_states="host"), MICRO_BATCH, 2, every),
            (
                shape_of(
                    name, optimizer_states="host", offload_activations=True, loss_chunks=8, update_in_backward=True
                ),
                WINDOW,
                1,
                (),
            ),
            (shape_of(name, shards=2), MICRO_BATCH, 2, ()),
            (shape_of(name, shards=2, loss_chunks=8), MICRO_BATCH, 2, every),
        ]
    for states in ("4bit", "mini"):
        found += [
            (shape_of("full", optimizer_states=states), MICRO_BATCH, 2, every),
            (shape_of("full", optimizer_states=states, update_in_backward=True), WINDOW, 1, every),
        ]
    return found
