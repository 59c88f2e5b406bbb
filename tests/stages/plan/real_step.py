"""Run a real optimizer step in this process and print its peak: what a plan's prediction is held against.

python -m tests.stages.plan.real_step MODEL_FOLDER TECHNIQUE RECOMPUTE MICRO_BATCH ROW_TOKENS ANSWERS PRECISION
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_contracts.config import ModelConfig, TrainConfig
from data_contracts.method import resolve
from stages.meter.memory import peak_resident_bytes, reset_peak, resident_bytes
from stages.model.batch import Row, collate
from stages.model.load import load_model, pin_model
from stages.technique.base import Technique
from stages.technique.recompute import blocks_of
from stages.technique.recompute import recompute as recompute_blocks
from stages.technique.step import load_moments, optimizer_for, optimizer_step, trainable

Step = Callable[[], None]


def main(folder: str, *arguments: str) -> None:
    """Print JSON: bytes held before the model was loaded, the step's peak, and whether the peak could be reset."""
    tiny = LlamaConfig(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    prepare(LlamaForCausalLM(tiny), *arguments)()  # loads every library: part of the process, not of the step
    gc.collect()
    before = resident_bytes()
    step = prepare(load_model(pin_model(ModelConfig(path=folder), Path("/"))), *arguments)
    for _ in range(2):  # the first faults in the moments' pages and warms the allocator
        exact = reset_peak()
        step()
    print(json.dumps({"before": before, "peak": peak_resident_bytes(), "exact": exact}))


def prepare(
    base: Any, technique: str, recompute: str, micro_batch: str, tokens: str, answers: str, precision: str
) -> Step:
    """Return a function that takes one optimizer step over two micro-batches."""
    torch.manual_seed(0)
    model = resolve(Technique, {"method": technique}, "t").wrap(base)
    if recompute == "yes":
        recompute_blocks(model, range(len(blocks_of(model))))
    model.train()
    optimizer = optimizer_for(model, TrainConfig(), 1e-4)
    zeros = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in trainable(model).items()}
    load_moments(optimizer, model, zeros, 1)
    mask = np.arange(int(tokens)) >= int(tokens) - int(answers)
    draw = np.random.default_rng(0)
    rows = [Row(str(n), draw.integers(3, 500, int(tokens)), mask) for n in range(int(micro_batch))]
    window = [collate(rows), collate(rows)]

    def step() -> None:
        optimizer_step(model, optimizer, window, clip=1.0, precision=precision)

    return step


if __name__ == "__main__":
    main(*sys.argv[1:])
