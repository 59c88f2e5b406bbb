"""Real artifacts for the score stage: token tables, a pinned model, a checkpoint with moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data_contracts.config import ModelConfig, ScoreConfig
from data_contracts.records import ModelPin, Summary
from stages.model.batch import Row
from stages.model.checkpoint import save_checkpoint
from stages.model.load import load_model, pin_model
from stages.score.stage import STAGE, ScoreSlice
from stages.stage import Artifact
from tests.local_work import LocalWork, inputs_of, work_for
from tests.stages.gradients.small_models import VOCABULARY, rows_of, tiny_llama

ADAM = {"beta2": 0.98, "epsilon": 1e-5}
"""What the checkpoints of these tests say of their optimizer: not the defaults."""


def save_tiny_model(folder: Path) -> ModelPin:
    """Save a float32 random Llama with a word tokenizer and pin it."""
    model: LlamaForCausalLM = tiny_llama(exact=False).float()
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return pin_model(ModelConfig(path=folder.name), folder.parent)


def tokens_of(folder: Path, rows: Sequence[Row], sources: Sequence[str] | None = None) -> Artifact:
    """Write a `tokens` table of these rows, sorted by id."""
    work = LocalWork(folder, {"t": "tokens"})
    order = sorted(range(len(rows)), key=lambda index: rows[index].example_id)
    with work.writer("t") as writer:
        for index in order:
            row = rows[index]
            writer.append(
                {
                    "example_id": row.example_id,
                    "source": sources[index] if sources else "all",
                    "input_ids": row.input_ids.tolist(),
                    "answer_mask": row.answer_mask.tolist(),
                    "n_tokens": len(row.input_ids),
                    "n_answer_tokens": int(row.answer_mask.sum()),
                    "truncated": False,
                }
            )
    return work.artifact("t")


def record_of(folder: Path, name: str, value: Any) -> Artifact:
    work = LocalWork(folder, {name: name})
    work.record(name, value)
    return work.artifact(name)


def checkpoint_of(folder: Path, pin: ModelPin, seed: int = 0, learning_rate: float = 1e-4) -> Artifact:
    """Save the base as a checkpoint with random positive second moments."""
    model = load_model(pin)
    torch.manual_seed(seed)
    moments = {
        name: (torch.zeros_like(value), torch.rand_like(value) * 1e-3 + 1e-7)
        for name, value in model.named_parameters()
    }
    work = LocalWork(folder, {"c": "checkpoint"})
    save_checkpoint(
        work.path("c"),
        model,
        pin,
        moments,
        {"technique": {"method": "full"}, "step": 4, "learning_rate": learning_rate, **ADAM, "updates": 4},
    )
    return work.artifact("c")


def moved_checkpoint(folder: Path, pin: ModelPin, size: float = 0.1, seed: int = 7) -> Artifact:
    """Save the base with every weight moved at random by `size` of its own spread, as a checkpoint with moments."""
    model = load_model(pin)
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * size * (value.std() if value.numel() > 1 else 1.0))
    moments = {
        name: (torch.zeros_like(value), torch.rand_like(value) * 1e-3 + 1e-7)
        for name, value in model.named_parameters()
    }
    work = LocalWork(folder, {"c": "checkpoint"})
    save_checkpoint(
        work.path("c"), model, pin, moments, {"technique": {"method": "full"}, "step": 9, **ADAM, "updates": 9}
    )
    return work.artifact("c")


@dataclass
class Setting:
    """A pool, a target and a base; `score` runs the stage on them."""

    folder: Path
    pin: ModelPin
    inputs: dict[str, Any]

    def score(self, name: str = "run", **config: Any) -> tuple[LocalWork, Summary]:
        """Run the stage in folder `name` (the same name resumes) with this `score` section."""
        work = work_for(STAGE, self.folder / name)
        summary = STAGE.run(ScoreSlice(seed=0, score=ScoreConfig(**config)), inputs_of(**self.inputs), work)
        return work, summary

    def scores(self, name: str = "run", **config: Any) -> dict[str, dict[str, Any]]:
        work, _ = self.score(name, **config)
        return {row["example_id"]: row for row in work.rows("scores")}


def make_setting(folder: Path, *, pool: Sequence[Row] | None = None, checkpoint: bool = False) -> Setting:
    pin = save_tiny_model(folder / "model")
    pool = rows_of(24, seed=1) if pool is None else pool
    target = rows_of(6, seed=2)
    inputs = {
        "base": record_of(folder / "base", "base", pin),
        "pool_tokens": tokens_of(folder / "pool", pool),
        "target_tokens": tokens_of(folder / "target", target, ["b", "a", "b", "a", "a", "b"]),
    }
    if checkpoint:
        inputs["checkpoint"] = checkpoint_of(folder / "checkpoint", pin)
    return Setting(folder, pin, inputs)


def odd_row(example_id: str, ids: Sequence[int], answer: Sequence[bool]) -> Row:
    return Row(example_id, np.array(ids), np.array(answer))
