"""A small real model after a few real optimizer steps, with real rows: for what only real moments show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_contracts.config import ModelConfig
from stages.model.batch import Row, collate
from stages.model.load import load_model, load_tokenizer, pin_model
from stages.model.loss import document_losses

Moments = dict[str, tuple[torch.Tensor, torch.Tensor]]
UPDATES = 12


def warmed_up(shared: Path, count: int) -> tuple[Any, Moments, list[Row]]:
    """Return the small real model after `UPDATES` steps of AdamW on grade-school maths, its moments, and `count` rows."""
    pin = pin_model(ModelConfig(path="stories260k"), shared / "data")
    tokenizer, model = load_tokenizer(pin), load_model(pin)
    lines = (shared / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for index in range(8 * UPDATES + count):
        item = json.loads(lines[index])
        prompt = tokenizer(item["question"])["input_ids"][:40]
        answer = tokenizer(item["answer"], add_special_tokens=False)["input_ids"][: 20 + index % 40]
        rows.append(Row(f"{index:04d}", np.array(prompt + answer), np.arange(len(prompt + answer)) >= len(prompt)))
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for step in range(UPDATES):
        loss_sum_D, answer_tokens_D = document_losses(model, collate(rows[8 * step : 8 * step + 8]))
        (loss_sum_D.sum() / answer_tokens_D.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state
    moments = {name: (state[p]["exp_avg"], state[p]["exp_avg_sq"]) for name, p in model.named_parameters()}
    return model, moments, rows[8 * UPDATES :]
