"""A small holdout on the tiny real model, and checkpoints of it, for the tests of evaluate and judge."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from data_contracts.config import ModelConfig
from stages.model.checkpoint import save_checkpoint
from stages.model.load import load_model, load_tokenizer
from stages.model.pin import pin_model
from stages.model.tokenise import Renderer
from stages.stage import Artifact
from stages.text.normalise import example_id
from tests.local_work import LocalWork

STORIES = [
    ("Tell me about Tom.", "Tom had a red ball."),
    ("Tell me about Lily.", "Lily liked to play in the park with her mom."),
    ("What did the dog do?", "The dog ran to the big tree and was happy."),
    ("What is in the box?", "A small blue car."),
    ("Who is sad?", "The cat is sad."),
]


def chat(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


class Bundle:
    """Artifacts of one holdout of the model in `shared`."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self.pin = pin_model(ModelConfig(path=str(shared / "data" / "stories260k")), folder)
        self.work = LocalWork(folder / "bundle", {"base": "base", "holdout": "examples", "holdout_tokens": "tokens"})
        self.work.record("base", self.pin)

    def write(self, rows: list[dict]) -> None:
        """Write `holdout` and `holdout_tokens` from {messages, extra?, source?} rows."""
        renderer = Renderer(load_tokenizer(self.pin))
        examples, tokens = [], []
        for number, row in enumerate(rows, start=1):
            messages, extra = row["messages"], row.get("extra", {})
            key = example_id(messages, [], "")
            source = row.get("source", "stories")
            examples.append(
                {
                    "example_id": key,
                    "source": source,
                    "file": "h.jsonl",
                    "row": number,
                    "messages": json.dumps(messages),
                    "tools": "",
                    "text": "",
                    "extra": json.dumps(extra),
                }
            )
            made = renderer.render(messages)
            tokens.append(
                {
                    "example_id": key,
                    "source": source,
                    "input_ids": made.ids,
                    "answer_mask": made.answer_mask,
                    "n_tokens": len(made.ids),
                    "n_answer_tokens": sum(made.answer_mask),
                    "truncated": row.get("truncated", False),
                }
            )
        for name, table in (("holdout", examples), ("holdout_tokens", tokens)):
            table.sort(key=lambda item: item["example_id"])
            self.work.table(name, {key: [item[key] for item in table] for key in table[0]})

    def artifact(self, name: str) -> Artifact:
        return self.work.artifact(name)

    def checkpoint(self, name: str, *, change: float, broken_token: int | None = None) -> Artifact:
        """Return a checkpoint of the base with its final norm scaled by 1 + `change`.

        The row of `broken_token` in the tied embedding becomes so large that logits overflow.
        """
        model = load_model(self.pin)
        with torch.no_grad():
            model.model.norm.weight.mul_(1 + change)
            if broken_token is not None:
                row_H = torch.zeros(model.config.hidden_size)
                row_H[0] = 3e38
                model.get_input_embeddings().weight[broken_token] = row_H
        moments = {key: (torch.zeros_like(p), torch.zeros_like(p)) for key, p in model.named_parameters()}
        trainer = {
            "technique": {"method": "full"},
            "step": 1,
            "tokens": 1,
            "learning_rate": 1e-3,
            "updates": 1,
            "base_digest": self.pin.digest,
        }
        self.work.gives[name] = "checkpoint"
        save_checkpoint(self.work.path(name), model, self.pin, moments, trainer)
        return self.work.artifact(name)
