"""The laboratory: short trainings on chosen shares of the pool's parts from the model as it stands, and losses between.

Shares are of answer tokens, which is what a loss is a mean over: rows are drawn so that they are met on average. Every
pass is counted; a probe that a killed attempt finished is found again. The model is the checkpoint with its adapters
merged. Shapes: P parts, D documents, G groups of the target.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_contracts.config import TrainConfig
from data_contracts.cost import Cost
from data_contracts.records import ModelPin
from stages.meter.flops import FlopModel
from stages.meter.memory import peak_bytes
from stages.mix.probing import Probing
from stages.model.batch import TokenBatch, TokenTable, collate, length_buckets
from stages.model.checkpoint import load_merged
from stages.model.loss import document_losses
from stages.stage import Work
from stages.technique.methods.lora import Lora
from stages.technique.probe import Adapter, interpolated, train_adapter


@dataclass(frozen=True)
class Bench:
    """What a laboratory works with: where model and tables lie, and how training is set."""

    pin: ModelPin
    checkpoint: Path | None
    pool: Path
    target: Path
    device: str
    precision: str
    batch_tokens: int
    train: TrainConfig


class Lab:
    """A loaded model, the pool and the target.

    Args:
        bench: what to load.
        part_N: int32 part of each pool row.
        parts: how many parts there are.
        work: for seeds, scratch, progress and charges.
    """

    def __init__(self, bench: Bench, part_N: np.ndarray, parts: int, work: Work) -> None:
        self._bench, self._work = bench, work
        self._began = time.perf_counter()
        self.model: Any = load_merged(bench.checkpoint, bench.pin, device=bench.device)
        self._pool, self._target = TokenTable(bench.pool), TokenTable(bench.target)
        self._rows_P = [np.flatnonzero(part_N == part) for part in range(parts)]
        self._answers_P = np.array([max(1.0, float(self._pool.answer_lengths[rows].mean())) for rows in self._rows_P])
        sources = np.array(self._target.sources.to_pylist())
        self.groups: tuple[str, ...] = tuple(np.unique(sources).tolist())
        self._group_D = np.searchsorted(np.array(self.groups), sources)
        self._forward = FlopModel.trace(self.model, train=False)
        self.flops = self.tokens = 0

    def probe(self, name: str, share_P: np.ndarray, how: Probing) -> Adapter:
        """Return the adapter of a short training on `share_P` of the parts (weights at least 0).

        Args:
            name: of its draws and of its file; equal names and shares give equal adapters.
            share_P: of answer tokens.
            how: how long and how fast.
        """
        rng = self._work.rng("mix", "probe", name)
        weight_P = share_P / self._answers_P
        part_W = rng.choice(len(weight_P), how.steps * how.window, p=weight_P / weight_P.sum())
        rows = np.concatenate([rng.choice(self._rows_P[part], 1) for part in part_W])
        windows = [rows[start : start + how.window] for start in range(0, len(rows), how.window)]
        lora = Lora(r=how.r, alpha=how.alpha)
        self._charge(windows, lora)
        path = self._work.folder / f"probe-{name}.safetensors"
        if path.is_file():
            return Adapter.load(path, self.model)
        with self._work.progress(f"probe {name}", how.steps, "step") as bar:

            def batches() -> Iterator[list[TokenBatch]]:
                for window in windows:
                    yield [self._batch(self._pool, bucket) for bucket in self._cut(self._pool, window)]
                    bar.advance()

            adapter = train_adapter(
                self.model,
                batches(),
                lora=lora,
                train=self._bench.train,
                learning_rate=how.learning_rate,
                seed=self._work.seed("mix", "adapter"),
                precision=self._bench.precision,
            )
        scratch = path.with_suffix(".unfinished")
        adapter.save(scratch)
        scratch.replace(path)
        return adapter

    def target_losses(self, adapters: Sequence[Adapter], share_A: np.ndarray, most: int | None) -> np.ndarray:
        """Return loss_G, nats an answer token of each group of the target, at θ + Σ x_a Δ_a.

        `most` rows of a group are read, the first by example_id; None reads all.
        """
        rows = [np.flatnonzero(self._group_D == group)[:most] for group in range(len(self.groups))]
        loss_D, tokens_D = self._losses(self._target, np.concatenate(rows), adapters, share_A)
        group_D = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
        return np.asarray(np.bincount(group_D, loss_D) / np.maximum(np.bincount(group_D, tokens_D), 1))

    def pool_losses(
        self, rows: np.ndarray, adapters: Sequence[Adapter], share_A: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (loss_D, tokens_D) of pool rows at θ + Σ x_a Δ_a: nats summed over answer tokens, and their number."""
        return self._losses(self._pool, rows, adapters, share_A)

    def close(self) -> None:
        """Charge what was done."""
        seconds = time.perf_counter() - self._began
        self._work.charge("probe", Cost(flops=self.flops, tokens=self.tokens, seconds=seconds, peak_bytes=peak_bytes()))

    @torch.no_grad()
    def _losses(
        self, table: TokenTable, rows: np.ndarray, adapters: Sequence[Adapter], share_A: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        place = {int(row): at for at, row in enumerate(rows.tolist())}
        loss_D, tokens_D = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
        kind = torch.device(self._bench.device).type
        with interpolated(self.model, adapters, share_A.tolist()):
            for bucket in self._cut(table, rows):
                batch = self._batch(table, bucket)
                with torch.autocast(kind, torch.bfloat16, enabled=self._bench.precision == "bfloat16"):
                    loss, tokens = document_losses(self.model, batch)
                at = [place[row] for row in bucket]
                loss_D[at], tokens_D[at] = loss.double().cpu().numpy(), tokens.cpu().numpy()
                self.flops += self._forward.forward(*batch.shape, len(batch.answers.label_N))
                self.tokens += batch.tokens
        return loss_D, tokens_D

    def _charge(self, windows: Sequence[np.ndarray], lora: Lora) -> None:
        """Count a probe's steps: from lengths alone, so that one found again costs what it had cost."""
        with torch.random.fork_rng(devices=[]):
            wrapped: Any = lora.wrap(self.model)
            meter = FlopModel.trace(wrapped, train=True)
            wrapped.unload()
        for window in windows:
            for bucket in self._cut(self._pool, window):
                lengths, answers = self._pool.lengths[bucket], self._pool.answer_lengths[bucket]
                self.flops += meter.train(len(bucket), int(lengths.max()), int(answers.sum()))
                self.tokens += int(lengths.sum())

    def _cut(self, table: TokenTable, rows: np.ndarray) -> list[list[int]]:
        """Return rows as batches of at most the planned tokens."""
        buckets = length_buckets([int(table.lengths[row]) for row in rows], self._bench.batch_tokens)
        return [[int(rows[place]) for place in bucket] for bucket in buckets]

    def _batch(self, table: TokenTable, rows: Sequence[int]) -> TokenBatch:
        return collate([table.row(row) for row in rows]).to(self._bench.device)
