"""DSIR: how much likelier an example's words are in the target than in the pool; no model is loaded.

The words and pairs of words of a text are hashed into buckets; a bag of n-grams is fitted to each target group and to
the pool, and an example's score is its log importance weight Σ_b c_b (log p_target(b) − log p_pool(b)). Memory is the
buckets; the pool is read twice. Source: Xie et al. 2023 ("Data Selection for Language Models via Importance
Resampling"). They draw examples by Gumbel noise on the weight, which on sums of this size is top-k; here selection is
the selector's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
import xxhash
from pydantic import Field

from data_contracts.errors import InputError
from stages.score.scorer import Block, Given, Scorer
from stages.text.examples import terms_of, texts_of


class DSIR(Scorer):
    """Log importance weight of an example for each target group, over hashed words and pairs of words."""

    reads = frozenset({"text"})
    grouped = True

    buckets: int = Field(10_000, ge=2, le=2**24, description="Hash buckets that words and pairs share.")
    smoothing: float = Field(1e-8, gt=0, le=1, description="Added to each bucket's probability.")
    per: Literal["visit", "ngram"] = Field(
        "visit", description="Sum over the example's n-grams, as in the paper (it grows with length), or their mean."
    )

    def prepare(self, given: Given) -> np.ndarray:
        """Return weight_JV, log p_target − log p_pool of each bucket.

        Raises `InputError` for a target group without words.
        """
        assert given.examples is not None
        pool_V = np.zeros(self.buckets)
        for text in texts_of(given.examples):
            np.add.at(pool_V, self.places(text), 1)
        weights = []
        for name, rows in zip(given.groups, given.members, strict=True):
            target_V = np.zeros(self.buckets)
            for row in rows:
                np.add.at(target_V, self.places(given.target_texts[row]), 1)
            if not target_V.any():
                raise InputError(
                    "a target group whose rows hold words", f"{name} has none", "look at the files of `data.target`"
                )
            weights.append(self._logs(target_V) - self._logs(pool_V))
        return np.stack(weights)

    def score(self, block: Block, state: np.ndarray) -> np.ndarray:
        """Return score_BJ; NaN for an example without a word."""
        assert block.texts is not None
        score_BJ = np.full((len(block.texts), len(state)), np.nan)
        for index, text in enumerate(block.texts):
            places = self.places(text)
            if len(places):
                found_JC = state[:, places]
                score_BJ[index] = found_JC.sum(axis=1) if self.per == "visit" else found_JC.mean(axis=1)
        return score_BJ

    def places(self, text: str) -> np.ndarray:
        """Return the bucket of each word and of each pair of neighbours, int64."""
        terms = terms_of(text)
        pairs = [f"{left} {right}" for left, right in pairwise(terms)]
        return np.array(
            [xxhash.xxh3_64_intdigest(gram.encode()) % self.buckets for gram in [*terms, *pairs]], dtype=np.int64
        )

    def _logs(self, count_V: np.ndarray) -> np.ndarray:
        logs: np.ndarray = np.log(count_V / max(1.0, count_V.sum()) + self.smoothing)
        return logs

    @classmethod
    def pointwise(cls) -> bool:
        """Return False: the pool's own distribution is that of the whole pool."""
        return False
