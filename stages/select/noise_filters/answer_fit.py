"""Answer fit: an answer that its prompt and the other answers of its source explain no better than any answer would.

The evidence for a row is the log-likelihood ratio of its answer tokens, Σ log p(t | row) − log p(t | pool), under
counts of tokens: p(· | row) mixes the row's prompt, the other answers of its source and the other answers of the pool,
p(· | pool) is the last alone; the row's own answer is left out of every count. The three shares are fitted to the pool
by expectation maximisation (Jelinek & Mercer 1980, deleted interpolation). It reads no model: it finds answers that
belong to another question or another task, not wrong facts in the right form. Held: a count for each token of each
source, and one batch of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from stages.select.noise import Evidence, NoiseFilter

FITTED_TOKENS, STEPS, ROWS_AT_ONCE = 200_000, 50, 4096
"""Answer tokens that the shares are fitted to (the first: ids are hashes), rounds of it, rows in memory at once."""


class AnswerFit(NoiseFilter):
    """−log-likelihood ratio of the answer, nats: how much less it belongs to its row than to the pool."""

    supported = True

    limit = 0.0

    def suspicion(self, evidence: Evidence) -> np.ndarray:
        """Return suspicion_N; NaN for a row without an answer token."""
        counts = _Counts(evidence.tokens)
        share_3 = counts.shares()
        parts = [_ratios(*part, share_3) for part in counts.parts()]
        return np.concatenate(parts) if parts else np.zeros(0)


class _Counts:
    """Answer tokens counted by source and over the pool."""

    def __init__(self, tokens: pa.Table) -> None:
        self._tokens = tokens
        self._code_N = tokens.column("source").combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
        keys, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for start, rows_t, ids_t, answer_t in _batches(tokens):
            new = _key(self._code_N[start + rows_t[answer_t]], ids_t[answer_t])
            keys, at = np.unique(np.concatenate([keys, new]), return_inverse=True)
            counts = np.bincount(at, weights=np.concatenate([counts, np.ones(len(new))]), minlength=len(keys))
        self._keys, self._counts = keys, counts.astype(np.float64)
        self._ids, at = np.unique(keys & _LOW, return_inverse=True)
        self._pool = np.bincount(at, weights=self._counts, minlength=len(self._ids))
        self._of_source = np.bincount(keys >> 32, weights=self._counts, minlength=int(self._code_N.max(initial=0)) + 1)

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yield (row_T of the part, probability_3T of each of its answer tokens, rows of the part).

        The three are those of the row's prompt, of its source's other answers (the pool's where it has none), and of
        the pool's other answers, where every known token counts once more.
        """
        for start, rows_t, ids_t, answer_t in _batches(self._tokens):
            row_T, id_T = rows_t[answer_t], ids_t[answer_t]
            code_T, count = self._code_N[start + row_T], min(ROWS_AT_ONCE, len(self._code_N) - start)
            answer_keys, at, number = np.unique(_key(row_T, id_T), return_inverse=True, return_counts=True)
            own_T, length_T = number[at], np.bincount(row_T, minlength=count)[row_T]
            prompt_T = _counted(_key(rows_t[~answer_t], ids_t[~answer_t]), answer_keys)[at]
            prompt_T = prompt_T / np.maximum(np.bincount(rows_t[~answer_t], minlength=count)[row_T], 1)
            pool_T = self._pool[np.searchsorted(self._ids, id_T)] - own_T + 1.0
            pool_T /= self._pool.sum() - length_T + len(self._ids)
            others_T = self._of_source[code_T] - length_T
            source_T = self._counts[np.searchsorted(self._keys, _key(code_T, id_T))] - own_T
            source_T = np.where(others_T > 0, source_T / np.maximum(others_T, 1), pool_T)
            yield row_T, np.stack([prompt_T, source_T, pool_T]), count

    def shares(self) -> np.ndarray:
        """Return share_3 of prompt, source and pool that make the pool's answers most likely."""
        parts, seen = [], 0
        for _, probability_3T, _ in self.parts():
            parts.append(probability_3T)
            seen += probability_3T.shape[1]
            if seen >= FITTED_TOKENS:
                break
        probability_3T = np.concatenate(parts, axis=1)[:, :FITTED_TOKENS] if seen else np.ones((3, 1))
        share_3 = np.full(3, 1 / 3)
        for _ in range(STEPS):
            belongs_3T = share_3[:, None] * probability_3T
            share_3 = (belongs_3T / belongs_3T.sum(axis=0)).mean(axis=1)
        return share_3


def _ratios(row_T: np.ndarray, probability_3T: np.ndarray, count: int, share_3: np.ndarray) -> np.ndarray:
    ratio_T = np.log(share_3 @ probability_3T) - np.log(probability_3T[2])
    suspicion_B = -np.bincount(row_T, weights=ratio_T, minlength=count)
    return np.where(np.bincount(row_T, minlength=count) > 0, suspicion_B, np.nan)


_LOW = (1 << 32) - 1


def _key(left: np.ndarray, token_id: np.ndarray) -> np.ndarray:
    return (left.astype(np.int64) << 32) | token_id.astype(np.int64)


def _counted(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return how often each of the sorted `wanted` stands in `found`."""
    found = np.sort(found)
    return np.searchsorted(found, wanted, side="right") - np.searchsorted(found, wanted, side="left")


def _batches(tokens: pa.Table) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (first row, row of each token from there, its id, whether it is supervised), some rows at a time."""
    for start in range(0, tokens.num_rows, ROWS_AT_ONCE):
        part = tokens.slice(start, ROWS_AT_ONCE)
        ids, mask = (part.column(name).combine_chunks() for name in ("input_ids", "answer_mask"))
        rows_t = np.repeat(np.arange(part.num_rows), part.column("n_tokens").to_numpy())
        yield start, rows_t, ids.flatten().to_numpy(), mask.flatten().to_numpy(zero_copy_only=False)
