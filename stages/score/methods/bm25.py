"""BM25: how many of the target's words an example has, rare ones counting more; no model is loaded.

Each target row is a query; a group's score is the mean over its queries. BM25 is a sum over a query's words, so the
mean over queries is one weight a word, w(t) = idf(t) · mean count of t in a query, and an example's score is
Σ_t w(t) · tf / (tf + k₁ (1 − b + b · length / mean length)): no index is held, memory is the target's vocabulary. The
pool is read twice, first for document frequencies. Source: Robertson & Zaragoza 2009, idf and saturation as in Lucene.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from data_contracts.errors import InputError
from stages.score.scorer import Block, Given, Scorer
from stages.text.examples import terms_of, texts_of


@dataclass(frozen=True)
class Query:
    """One weight a word and group, and the pool's mean number of words in an example."""

    weights_J: Mapping[str, np.ndarray]
    groups: int
    mean_length: float


class BM25(Scorer):
    """Mean BM25 of an example for the rows of each target group, each row's whole text a query."""

    reads = frozenset({"text"})
    supported = True
    grouped = True

    k1: float = Field(1.5, ge=0, le=10, description="How soon more of the same word stops counting; 0: at once.")
    b: float = Field(0.75, ge=0, le=1, description="How far long examples are held back; 0: not at all.")

    def prepare(self, given: Given) -> Query:
        """Weigh the target's words by the pool's document frequencies. Raises `InputError` where there are none."""
        count_J = {group: Counter[str]() for group in range(len(given.members))}
        for group, rows in enumerate(given.members):
            for row in rows:
                count_J[group].update(terms_of(given.target_texts[row]))
        wanted = set().union(*count_J.values())
        if not wanted:
            raise InputError("a target whose rows hold words", "there are none", "look at the files of `data.target`")
        assert given.examples is not None
        frequency: Counter[str] = Counter()
        words = documents = 0
        for text in texts_of(given.examples):
            terms = terms_of(text)
            frequency.update(wanted.intersection(terms))
            words, documents = words + len(terms), documents + 1
        weights = {}
        for term in wanted:
            rarity = math.log(1 + (documents - frequency[term] + 0.5) / (frequency[term] + 0.5))
            mean_J = [count_J[group][term] / len(rows) for group, rows in enumerate(given.members)]
            weights[term] = rarity * np.array(mean_J)
        return Query(weights, len(given.members), words / max(1, documents))

    def score(self, block: Block, state: Query) -> np.ndarray:
        """Return score_BJ; NaN for an example without a word."""
        assert block.texts is not None
        score_BJ = np.zeros((len(block.texts), state.groups))
        for index, text in enumerate(block.texts):
            terms = terms_of(text)
            if not terms:
                score_BJ[index] = np.nan
                continue
            held_back = self.k1 * (1 - self.b + self.b * len(terms) / state.mean_length)
            for term, count in Counter(terms).items():
                if term in state.weights_J:
                    score_BJ[index] += state.weights_J[term] * (count / (count + held_back))
        return score_BJ

    @classmethod
    def pointwise(cls) -> bool:
        """Return False: document frequencies are those of the whole pool."""
        return False
