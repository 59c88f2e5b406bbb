"""One model on the bench: batches what it is asked, and counts the operations and tokens of all of it.

One model is held at a time. Losses are computed in length buckets, so padding is small; a greedy answer is priced as
one forward pass over prompt and answer, which is what a cached generation multiplies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from data_contracts.cost import Cost
from data_contracts.records import ModelPin
from stages.meter.flops import FlopModel
from stages.model.batch import Row, collate, length_buckets
from stages.model.checkpoint import load_merged
from stages.model.generate import generate
from stages.model.load import load_tokenizer
from stages.model.loss import document_losses
from stages.model.tokenise import Renderer

BATCH_TOKENS = 4096
"""Padded tokens of one forward pass."""


class ModelBench:
    """A base model, or a checkpoint of it with its adapters merged, in float32.

    Args:
        pin: the base.
        checkpoint: folder of the checkpoint; None for the base itself.
        device: cpu or cuda.

    Attributes:
        spent: so far by cause: `infer` for generating, seconds included, `eval` for losses, whose seconds are not told
            apart from loading and marking.
    """

    def __init__(self, pin: ModelPin, checkpoint: Path | None, device: str) -> None:
        self._model = load_merged(checkpoint, pin, dtype=torch.float32, device=device)
        self._meter = FlopModel.trace(self._model, train=False)
        self._device = device
        self.tokenizer: Any = load_tokenizer(pin)
        self.longest = pin.longest
        self.spent = {"eval": Cost(), "infer": Cost()}

    @cached_property
    def renderer(self) -> Renderer:
        """Turns messages into token ids and an answer mask for this model."""
        return Renderer(self.tokenizer, vocabulary=self._model.config.vocab_size)

    @torch.no_grad()
    def losses(self, rows: Sequence[Row]) -> list[tuple[float, int]]:
        """Return (nats over the answer tokens, answer tokens) of each row, in the order given."""
        found: list[tuple[float, int]] = [(0.0, 0)] * len(rows)
        for bucket in length_buckets([len(row.input_ids) for row in rows], BATCH_TOKENS):
            batch = collate([rows[index] for index in bucket]).to(self._device)
            loss_D, tokens_D = document_losses(self._model, batch)
            flops = self._meter.forward(*batch.shape, int(tokens_D.sum()))
            self.spent["eval"] += Cost(flops=flops, tokens=batch.tokens)
            for index, loss, tokens in zip(bucket, loss_D.double().tolist(), tokens_D.tolist(), strict=True):
                found[index] = (loss, tokens)
        return found

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: frozenset[int]
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt, in the order given."""
        began = time.perf_counter()
        answers = generate(
            self._model,
            self.tokenizer,
            prompts,
            max_new_tokens=max_new_tokens,
            batch_tokens=BATCH_TOKENS,
            stop_ids=stop_ids,
        )
        flops = tokens = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            passed = len(prompt) + max(0, len(answer) - 1)
            flops += self._meter.forward(1, passed, max(1, len(answer)))
            tokens += passed
        self.spent["infer"] += Cost(flops=flops, tokens=tokens, seconds=time.perf_counter() - began)
        return answers
