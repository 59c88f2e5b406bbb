"""A tiny random Llama on disk, made-up token tables, and everything a training stage takes, without any shared data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_contracts.config import ModelConfig
from data_contracts.records import ModelPin, Plan
from stages.model.load import pin_model
from stages.stage import Artifact, Inputs
from tests.local_work import LocalWork

VOCABULARY = 64


def llama(*, tied: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return a two-layer Llama with random weights.

    In float64 its norms are torch's own: those of transformers compute in float32 whatever the model is.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        pad_token_id=None,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(dtype)
    if dtype == torch.float64:
        for name, module in list(model.named_modules()):
            if type(module).__name__ == "LlamaRMSNorm":
                model.set_submodule(name, torch.nn.RMSNorm(16, eps=module.variance_epsilon, dtype=dtype))
    return model


def write_model(folder: Path, *, tied: bool = True) -> ModelPin:
    """Write the Llama with a word tokenizer to `folder` and pin it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir(parents=True, exist_ok=True)
    llama(tied=tied).save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"})
    )
    return pin_model(ModelConfig(path=folder.name), folder.parent)


def token_columns(rows: int, seed: int, *, longest: int = 20) -> dict[str, list[Any]]:
    """Return `tokens` columns of random rows of unequal lengths, the answer being each row's later part."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, longest + 1, rows)
    starts = [int(rng.integers(0, length - 1)) for length in lengths]
    masks = [[place >= start for place in range(length)] for start, length in zip(starts, lengths, strict=True)]
    return {
        "example_id": [f"{seed:04x}{number:028x}" for number in range(rows)],
        "source": [f"s{number % 3}" for number in range(rows)],
        "input_ids": [rng.integers(2, VOCABULARY, length).tolist() for length in lengths],
        "answer_mask": masks,
        "n_tokens": lengths.tolist(),
        "n_answer_tokens": [sum(mask) for mask in masks],
        "truncated": [False] * rows,
    }


def selection_columns(ids: list[str], **settings: Any) -> dict[str, list[Any]]:
    """Return `selection` columns that take `ids` in their order; `weight`, `repeats`, `order` and `mixture` may be lists."""
    count = len(ids)
    return {
        "rank": list(range(count)),
        "example_id": ids,
        "weight": settings.get("weight", [1.0] * count),
        "repeats": settings.get("repeats", [1] * count),
        "order": settings.get("order", [0] * count),
        "mixture": settings.get("mixture", ["s0"] * count),
        "gain": [None] * count,
        "reason": ["test"] * count,
    }


def plan_of(**settings: Any) -> Plan:
    """Return a plan; the technique is `full` and a window holds 2 x 2 rows unless given."""
    values: dict[str, Any] = {
        "technique": {"method": "full"},
        "precision": "float32",
        "micro_batch": 2,
        "accumulation": 2,
        "packed": False,
        "row_tokens": 24,
        "trainable": 1,
        "peak_bytes": 1,
        "phases": {},
        "flops_per_token": 1,
        "flops_per_token_forward": 1,
        "pass_flops": 1,
        "why": "test",
    }
    return Plan(**(values | settings))


GIVES = {
    "base": "base",
    "plan": "plan",
    "tokens": "tokens",
    "selection": "selection",
    "validation_tokens": "tokens",
    "target_tokens": "tokens",
    "decision": "decision",
}


class House:
    """The inputs of `train`, on disk under `folder`.

    Args:
        folder: where they go.
        rows: selected rows.
        plan: settings of the plan.
        selection: settings of the selection.
        longest: tokens of the longest row.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rows: int = 12,
        plan: dict[str, Any] | None = None,
        selection: dict[str, Any] | None = None,
        decision: Any = None,
        longest: int = 20,
    ) -> None:
        shutil.rmtree(folder / "given", ignore_errors=True)  # made again by a process that goes on with a killed one
        given = LocalWork(folder / "given", GIVES)
        self.pin = write_model(folder / "model")
        tokens = token_columns(rows, 1, longest=longest)
        given.record("base", self.pin)
        given.record("plan", plan_of(**(plan or {})))
        given.table("tokens", tokens)
        given.table("validation_tokens", token_columns(9, 2))
        given.table("target_tokens", token_columns(5, 3))
        given.table("selection", selection_columns(tokens["example_id"], **(selection or {})))
        if decision is not None:
            given.record("decision", decision)
        self.ids = tokens["example_id"]
        self.artifacts: dict[str, Artifact] = {
            name: given.artifact(name) for name in GIVES if name != "decision" or decision is not None
        }

    def inputs(self, **more: Artifact) -> Inputs:
        """Return the inputs of `train`, with `more` of them."""
        return Inputs({name: (item,) for name, item in (self.artifacts | more).items()})

    def begin_inputs(self) -> Inputs:
        """Return the inputs of `begin`."""
        named = {"base": "base", "plan": "plan", "pool_tokens": "tokens", "validation_tokens": "validation_tokens"}
        return Inputs({name: (self.artifacts[ours],) for name, ours in named.items()})
