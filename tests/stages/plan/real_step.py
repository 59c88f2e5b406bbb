"""Run a real optimizer step in this process and print its peak: what a plan's prediction is held against.

python -m tests.stages.plan.real_step MODEL_FOLDER TECHNIQUE RECOMPUTE MICRO_BATCH ROW_TOKENS ANSWERS PRECISION
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from data_contracts.config import ModelConfig, TrainConfig
from data_contracts.method import resolve
from stages.meter.memory import peak_resident_bytes as resident_peak
from stages.meter.memory import reset_peak, resident_bytes
from stages.model.batch import Row, collate
from stages.model.load import load_model, pin_model
from stages.technique.base import Technique
from stages.technique.step import load_moments, optimizer_for, optimizer_step, trainable


def main(
    folder: str, technique: str, recompute: str, micro_batch: str, tokens: str, answers: str, precision: str
) -> None:
    """Print JSON: bytes before the model was loaded, the step's peak, and whether the peak could be reset."""
    import peft  # noqa: F401 - part of the process, not of the step

    torch.manual_seed(0)
    torch.randn(64, 64) @ torch.randn(64, 64)
    import transformers.models.llama.modeling_llama  # noqa: F401

    before = resident_bytes()
    model = resolve(Technique, {"method": technique}, "t").wrap(
        load_model(pin_model(ModelConfig(path=folder), Path("/")))
    )
    if recompute == "yes":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = optimizer_for(model, TrainConfig(), 1e-4)
    zeros = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in trainable(model).items()}
    load_moments(optimizer, model, zeros, 1)
    del zeros
    mask = np.arange(int(tokens)) >= int(tokens) - int(answers)
    draw = np.random.default_rng(0)
    rows = [Row(str(n), draw.integers(3, 500, int(tokens)), mask) for n in range(int(micro_batch))]
    window = [collate(rows), collate(rows)]
    for _ in range(2):  # the first faults in the moments' pages and warms the allocator
        exact = reset_peak()
        optimizer_step(model, optimizer, window, clip=1.0, precision=precision)
    print(json.dumps({"before": before, "peak": resident_peak(), "exact": exact}))


if __name__ == "__main__":
    main(*sys.argv[1:])
